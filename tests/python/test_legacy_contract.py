"""What programs take for granted about `Buffer` (V1); each test bears the ids of clients.md."""

from __future__ import annotations

import gc
import inspect
import subprocess
import sys
import textwrap
import threading
import weakref
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import deep_ep
import legacy_exchange as ex
import legacy_oracle as oracle
import problem as problems
from deep_ep import Buffer, ContractError, EventHandle, EventOverlap
from deep_ep.buffers.legacy import Config
from exchange import check_same, put
from problem import Problem
from ranks import Rank, RankPool, own_stream, run_threads, worker_environment

PROBLEM = Problem(num_ranks=3, tokens=(9, 0, 5), hidden=48, num_experts=6, routing="masked")


pytestmark = pytest.mark.usefixtures("short_waits")


def arguments_of(buffer: Buffer, rank: Rank, problem: Problem = PROBLEM) -> dict[str, Any]:
    tokens = problems.tokens_of(problem)[rank.index]
    return ex.arguments_of(buffer, tokens, problem.num_experts)


def check_works(buffer: Buffer, rank: Rank, problem: Problem = PROBLEM) -> None:
    handle = ex.check_dispatch(buffer, rank, problem)
    ex.check_combine(buffer, rank, problem, handle)


# --- names and signatures -------------------------------------------------------------------------

REQUIRED = inspect.Parameter.empty
DISPATCH = {
    "x": REQUIRED,
    "handle": None,
    "num_tokens_per_rank": None,
    "num_tokens_per_rdma_rank": None,
    "is_token_in_rank": None,
    "num_tokens_per_expert": None,
    "topk_idx": None,
    "topk_weights": None,
    "expert_alignment": 1,
    "num_worst_tokens": 0,
    "config": None,
    "previous_event": None,
    "async_finish": False,
    "allocate_on_comm_stream": False,
}
COMBINE = {
    "x": REQUIRED,
    "handle": REQUIRED,
    "topk_weights": None,
    "bias": None,
    "config": None,
    "previous_event": None,
    "async_finish": False,
    "allocate_on_comm_stream": False,
}
SIZES = {
    "num_max_dispatch_tokens_per_rank": REQUIRED,
    "hidden": REQUIRED,
    "num_ranks": REQUIRED,
    "num_experts": REQUIRED,
}
SIGNATURES: dict[str, dict[str, Any]] = {
    "__init__": {
        "group": REQUIRED,
        "num_nvl_bytes": 0,
        "num_rdma_bytes": 0,
        "low_latency_mode": False,
        "num_qps_per_rank": 24,
        "allow_nvlink_for_low_latency_mode": True,
        "allow_mnnvl": False,
        "explicitly_destroy": False,
        "enable_shrink": False,
        "comm": None,
    },
    "destroy": {},
    "set_num_sms": {"new_num_sms": REQUIRED},
    "is_sm90_compiled": {},
    "capture": {},
    "get_comm_stream": {},
    "get_local_buffer_tensor": {
        "dtype": REQUIRED,
        "size": None,
        "offset": 0,
        "use_rdma_buffer": False,
    },
    "get_low_latency_rdma_size_hint": SIZES,
    "get_dispatch_config": {"num_ranks": REQUIRED},
    "get_combine_config": {"num_ranks": REQUIRED},
    "get_dispatch_layout": {
        "topk_idx": REQUIRED,
        "num_experts": REQUIRED,
        "previous_event": None,
        "async_finish": False,
        "allocate_on_comm_stream": False,
    },
    "dispatch": DISPATCH,
    "internode_dispatch": {k: v for k, v in DISPATCH.items() if k != "num_worst_tokens"},
    "combine": COMBINE,
    "internode_combine": COMBINE,
    "clean_low_latency_buffer": {k: v for k, v in SIZES.items() if k != "num_ranks"},
    "low_latency_dispatch": {
        "x": REQUIRED,
        "topk_idx": REQUIRED,
        "num_max_dispatch_tokens_per_rank": REQUIRED,
        "num_experts": REQUIRED,
        "cumulative_local_expert_recv_stats": None,
        "dispatch_wait_recv_cost_stats": None,
        "use_fp8": True,
        "round_scale": False,
        "use_ue8m0": False,
        "async_finish": False,
        "return_recv_hook": False,
    },
    "low_latency_combine": {
        "x": REQUIRED,
        "topk_idx": REQUIRED,
        "topk_weights": REQUIRED,
        "handle": REQUIRED,
        "use_logfmt": False,
        "zero_copy": False,
        "async_finish": False,
        "return_recv_hook": False,
        "out": None,
        "combine_wait_recv_cost_stats": None,
    },
    "get_next_low_latency_combine_buffer": {"handle": REQUIRED},
    "low_latency_update_mask_buffer": {"rank_to_mask": REQUIRED, "mask": False},
    "low_latency_query_mask_buffer": {"mask_status": REQUIRED},
    "low_latency_clean_mask_buffer": {},
}


@pytest.mark.parametrize("name", SIGNATURES)
def test_i10_parameters_have_the_names_order_and_defaults_of_v1(name: str) -> None:
    parameters = inspect.signature(getattr(Buffer, name)).parameters.values()
    actual = {p.name: p.default for p in parameters if p.name != "self"}
    assert list(actual.items()) == list(SIGNATURES[name].items())


def test_i1_i4_i7_the_class_can_be_imported_from_where_programs_do() -> None:
    from deep_ep.buffers import legacy

    assert deep_ep.Buffer is Buffer is legacy.Buffer
    assert "Buffer" in dir(deep_ep)


def test_i8_importing_the_package_loads_no_torch_and_the_class_starts_nothing() -> None:
    code = """
        import sys, threading, deep_ep
        assert "torch" not in sys.modules
        deep_ep.Buffer
        assert threading.active_count() == 1
        assert not sys.modules["torch"].cuda.is_initialized()
    """
    run_python(code)


def run_python(code: str) -> None:
    subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        env=worker_environment(),
        check=True,
        timeout=60,
    )


def test_i10_the_constructor_can_be_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Buffer, "__init__", lambda self: None)
    buffer = Buffer()
    assert isinstance(buffer, Buffer)
    assert weakref.ref(buffer)() is buffer


# --- the group and the life of a buffer -----------------------------------------------------------


class Wrapper:
    """A group of which only `rank`, `size` and `torch.distributed` may be used."""

    def __init__(self, group: object) -> None:
        self._group = group

    def rank(self) -> int:
        return self._group.rank()

    def size(self) -> int:
        return self._group.size()


def test_g1_g2_g3_g5_any_kind_of_group_is_taken(pool: RankPool, backend: str) -> None:
    pool.run(2, use_groups)


def use_groups(rank: Rank) -> None:
    import torch.distributed as dist

    wrapped = Wrapper(rank.group)

    def unwrapping(function: Any) -> Any:  # noqa: ANN401
        def call(*args: object, **options: object) -> object:
            args = tuple(rank.group if a is wrapped else a for a in args)
            named = {k: rank.group if v is wrapped else v for k, v in options.items()}
            return function(*args, **named)

        return call

    names = [name for name in dir(dist) if name.startswith(("all_gather", "get_"))]
    saved = {name: getattr(dist, name) for name in names if callable(getattr(dist, name))}
    for group in (rank.group, wrapped):
        for name, function in saved.items():
            setattr(dist, name, unwrapping(function))
        try:
            buffer = Buffer(group=group, num_nvl_bytes=1 << 20)
        finally:
            for name, function in saved.items():
                setattr(dist, name, function)
        assert buffer.group is group
        check_works(buffer, rank, Problem(tokens=(3, 4)))


def test_g4_an_mpi_communicator_instead_of_a_group(backend: str) -> None:
    def body(rank: Rank) -> None:
        with pytest.raises(ValueError, match="group or comm"):
            Buffer(None)
        communicator = SimpleNamespace(
            Get_rank=rank.group.rank,
            Get_size=rank.group.size,
            allgather=rank.group._bootstrap.all_gather,
        )
        buffer = Buffer(None, 1 << 20, comm=communicator)
        assert (buffer.rank, buffer.group_size) == (rank.index, 3)
        check_works(buffer, rank)

    run_threads(3, body)


def test_g6_n9_buffers_of_all_kinds_live_side_by_side(backend: str) -> None:
    def body(rank: Rank) -> None:
        buffers = [ex.make_buffer(rank), ex.make_buffer(rank, low_latency_mode=True)]
        other = deep_ep.EPBuffer(rank.group, num_max_tokens_per_rank=9, hidden=48)
        handles = [ex.check_dispatch(buffer, rank, PROBLEM) for buffer in buffers]
        other.barrier()
        x = put(torch.ones(2, 128, dtype=torch.bfloat16))
        topk_idx = put(torch.arange(2).unsqueeze(1))
        buffers[1].clean_low_latency_buffer(2, 128, 3)
        (_, count, *_) = buffers[1].low_latency_dispatch(x, topk_idx, 2, 3)
        assert count.tolist() == ([3] if rank.index < 2 else [0])
        for buffer, handle in reversed(list(zip(buffers, handles, strict=True))):
            ex.check_combine(buffer, rank, PROBLEM, handle)
            buffer.destroy()

    run_threads(3, body)


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 6, 8, 12, 16, 48, 72, 160, 320])
def test_g7_c6_sizes_and_settings_are_told_for_any_number_of_ranks(num_ranks: int) -> None:
    for config in (Buffer.get_dispatch_config(num_ranks), Buffer.get_combine_config(num_ranks)):
        assert isinstance(config, Config)
        assert config.num_sms == Buffer.num_sms
        for hidden_bytes in (256, 14336):
            assert config.get_nvl_buffer_size_hint(hidden_bytes, num_ranks) > 0
            rdma = config.get_rdma_buffer_size_hint(hidden_bytes, num_ranks)
            assert (rdma == 0) == (num_ranks <= 8)
    assert Buffer.get_low_latency_rdma_size_hint(128, 7168, num_ranks, num_ranks * 4) > 0


def test_c6_the_hints_are_those_of_v1() -> None:
    """10 channels, 8 ranks, 5 counters, 256 slots of a token: row, source, 128 ids and weights."""
    token = 14336 + 8 + 128 * (8 + 4 + 4)
    config = Config(20, 6, 256, 6, 128)
    nvl = 10 * 8 * (5 * 4 + 256 * token)
    assert config.get_nvl_buffer_size_hint(14336, 8) == -(-nvl // 128) * 128
    assert config.num_max_rdma_chunked_recv_tokens == 132
    rdma = 10 * 2 * ((8 * 2 + 2) * 2 * 4 + 132 * 2 * (token + 16))
    assert config.get_rdma_buffer_size_hint(14336, 16) == -(-rdma // 128) * 128


def test_c6_c9_a_larger_buffer_may_take_the_place_of_the_first(backend: str) -> None:
    def body(rank: Rank) -> None:
        for num_tokens in (8, 64):
            problem = Problem(num_ranks=2, tokens=num_tokens, hidden=64, num_experts=4)
            size = Buffer.get_dispatch_config(2).get_nvl_buffer_size_hint(128, 2)
            buffer = Buffer(rank.group, size, 0)
            check_works(buffer, rank, problem)
            inner = weakref.ref(buffer._ep)
            del buffer
            gc.collect()
            assert inner() is None

    run_threads(2, body)


def test_c1_arguments_may_be_given_by_position_or_by_name(backend: str) -> None:
    def body(rank: Rank) -> None:
        buffer = Buffer(
            rank.group,
            3 << 20,
            1 << 20,
            low_latency_mode=True,
            num_qps_per_rank=2,
            allow_nvlink_for_low_latency_mode=False,
            allow_mnnvl=True,
            explicitly_destroy=True,
            enable_shrink=True,
        )
        # C4
        assert (buffer.rank, buffer.group_size, buffer.group) == (rank.index, 2, rank.group)
        assert (buffer.num_nvl_bytes, buffer.num_rdma_bytes) == (3 << 20, 1 << 20)
        assert buffer.low_latency_mode
        assert buffer.explicitly_destroy
        assert buffer.runtime is not None
        buffer.destroy()
        assert buffer.runtime is None
        with pytest.raises(RuntimeError, match="destroyed"):
            buffer.combine(torch.zeros(0, 1), ())
        with pytest.raises(TypeError):
            Buffer(rank.group, use_nvfp4=True)

    run_threads(2, body)


def test_c5_the_number_of_sms_is_that_of_all_buffers() -> None:
    before = Buffer.num_sms
    try:
        Buffer.set_num_sms(24)
        assert Buffer.num_sms == Buffer.get_dispatch_config(2).num_sms == 24
        Buffer.__new__(Buffer).set_num_sms(8)
        assert Buffer.num_sms == 8
        with pytest.raises(AssertionError):
            Buffer.set_num_sms(7)
    finally:
        Buffer.set_num_sms(before)


def test_c7_a_config_is_made_by_position_or_by_name() -> None:
    by_name = Config(
        num_sms=24,
        num_max_nvl_chunked_send_tokens=8,
        num_max_nvl_chunked_recv_tokens=256,
        num_max_rdma_chunked_send_tokens=16,
        num_max_rdma_chunked_recv_tokens=128,
    )
    assert by_name == Config(24, 8, 256, 16, 128)
    for wrong in ((-2,), (20, 0), (20, 256, 256), (20, 6, 256, 200, 128)):
        with pytest.raises(AssertionError):
            Config(*wrong)


def test_c8_the_question_for_sm90_has_an_answer() -> None:
    assert Buffer.is_sm90_compiled() is True


@pytest.mark.parametrize("explicitly", [False, True], ids=["implicit", "explicit"])
def test_c10_c11_a_process_ends_cleanly_without_destroy(explicitly: bool) -> None:
    code = f"""
        import os, torch, torch.distributed as dist, deep_ep
        os.environ |= dict(RANK="0", WORLD_SIZE="1")
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        buffer = deep_ep.Buffer(dist.group.WORLD, 1 << 20, explicitly_destroy={explicitly})
        dist.destroy_process_group()
    """
    run_python(code)


def test_c11_destroy_needs_to_have_been_announced(backend: str) -> None:
    def body(rank: Rank) -> None:
        with pytest.raises(AssertionError):
            Buffer(rank.group).destroy()

    run_threads(1, body)


def test_c14_local_memory_is_a_writable_view(backend: str) -> None:
    def body(rank: Rank) -> None:
        buffer = Buffer(rank.group, 1 << 10, 1 << 11)
        whole = buffer.get_local_buffer_tensor(torch.int64)
        assert whole.shape == (128,)
        whole.copy_(put(torch.arange(128)))
        part = buffer.get_local_buffer_tensor(torch.int64, size=torch.Size([2, 3]), offset=10)
        assert part.tolist() == [[10, 11, 12], [13, 14, 15]]
        assert len(buffer.get_local_buffer_tensor(torch.int64, offset=100)) == 28
        assert len(buffer.get_local_buffer_tensor(torch.uint8, use_rdma_buffer=True)) == 1 << 11
        with pytest.raises(ContractError):
            buffer.get_local_buffer_tensor(torch.int64, size=torch.Size([129]))

    run_threads(1, body)


# --- events ---------------------------------------------------------------------------------------

PREVIOUS = {
    "none": lambda: None,
    "handle": EventHandle,
    "overlap_of_handle": lambda: EventOverlap(EventHandle()),
    "empty_overlap": lambda: EventOverlap(None),
    "capture": Buffer.capture,
    "capture_of_v2_5": deep_ep.EPBuffer.capture,
}


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("make", PREVIOUS.values(), ids=PREVIOUS.keys())
def test_e1_e2_e3_e4_e6_every_call_takes_and_returns_events(
    backend: str,
    make: Any,  # noqa: ANN401
    is_async: bool,
) -> None:
    def body(rank: Rank) -> None:
        buffer = ex.make_buffer(rank)
        options = {"previous_event": make(), "async_finish": is_async}
        tokens = problems.tokens_of(PROBLEM)[rank.index]
        *_, event = buffer.get_dispatch_layout(put(tokens.topk_idx), 6, **options)
        assert isinstance(event, EventOverlap)
        assert (event.event is not None) == is_async
        options |= {"allocate_on_comm_stream": True}
        handle = ex.check_dispatch(buffer, rank, PROBLEM, **options | {"previous_event": event})
        *_, event = buffer.dispatch(put(tokens.x), handle=handle, **options)
        assert (event.event is not None) == is_async
        thread = threading.Thread(target=event.current_stream_wait)
        thread.start()
        thread.join()
        ex.check_combine(buffer, rank, PROBLEM, handle, **options | {"previous_event": event})
        buffer.destroy()

    run_threads(3, body)


def test_e1_what_is_no_event_is_refused_on_all_ranks() -> None:
    def body(rank: Rank) -> None:
        buffer = ex.make_buffer(rank)
        arguments = arguments_of(buffer, rank)
        event = 1 if rank.index == 0 else None
        with pytest.raises(TypeError if rank.index == 0 else RuntimeError):
            buffer.dispatch(**arguments, previous_event=event)
        check_works(buffer, rank)

    run_threads(3, body)


def test_e7_two_threads_take_turns_on_one_buffer(backend: str) -> None:
    def body(rank: Rank) -> None:
        buffer = ex.make_buffer(rank)
        turns = [threading.Event(), threading.Event()]
        errors: list[BaseException] = []

        def work(which: int) -> None:
            try:
                for _ in range(3):
                    assert turns[which].wait(20)
                    turns[which].clear()
                    with own_stream():
                        check_works(buffer, rank, PROBLEM.rerouted(which))
                    turns[1 - which].set()
            except BaseException as error:
                errors.append(error)

        threads = [threading.Thread(target=work, args=(which,)) for which in (0, 1)]
        turns[0].set()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not errors
        buffer.destroy()

    run_threads(3, body)


def test_e8_inputs_may_be_overwritten_and_outputs_are_the_callers(backend: str) -> None:
    def body(rank: Rank) -> None:
        buffer = ex.make_buffer(rank)
        arguments = {
            name: value.clone() if isinstance(value, torch.Tensor) else value
            for name, value in arguments_of(buffer, rank).items()
        }
        recv_x, ids, weights, _, handle, event = buffer.dispatch(**arguments, async_finish=True)
        event.current_stream_wait()
        for name in ("x", "topk_idx", "topk_weights", "num_tokens_per_rank"):
            arguments[name].zero_()
        expected = oracle.dispatch(problems.tokens_of(PROBLEM), 6, rank.index)
        check_same("recv_x", recv_x, expected.x, rank.index)
        for tensor in (recv_x, ids, weights):
            tensor.zero_()
        ex.check_combine(buffer, rank, PROBLEM, handle)
        buffer.destroy()
        ex.check_handle(handle, expected, rank)

    run_threads(3, body)


# --- throughput calls (N) -------------------------------------------------------------------------


def test_n1_the_layout_is_five_values_by_position_or_name(backend: str) -> None:
    def body(rank: Rank) -> None:
        buffer = ex.make_buffer(rank)
        topk_idx = put(problems.tokens_of(PROBLEM)[rank.index].topk_idx)
        one, two = (
            buffer.get_dispatch_layout(topk_idx, 6),
            buffer.get_dispatch_layout(
                topk_idx=topk_idx,
                num_experts=6,
                previous_event=None,
                async_finish=False,
                allocate_on_comm_stream=False,
            ),
        )
        assert len(one) == len(two) == 5
        assert one[1] is None
        ex.check_layout(buffer, rank, PROBLEM)
        buffer.destroy()

    run_threads(3, body)


def test_n2_n3_n10_a_dispatch_is_six_values(backend: str) -> None:
    def body(rank: Rank) -> None:
        buffer = ex.make_buffer(rank)
        options = {"handle": None, "config": None, "expert_alignment": 16}
        results = buffer.dispatch(**arguments_of(buffer, rank) | options)
        assert len(results) == 6
        _, ids, weights, counts, _, _ = results
        assert type(counts) is list
        assert all(type(count) is int and count % 16 == 0 for count in counts)
        assert torch.tensor(counts).sum() == sum(counts)
        assert ids.dtype == deep_ep.topk_idx_t
        assert weights.dtype == torch.float32
        assert (weights[ids == -1] == 0).all()
        buffer.destroy()

    run_threads(3, body)


@pytest.mark.parametrize("domains", [1, 2])
def test_n4_n8_handles_are_flat_tuples_of_tensors_and_many_may_be_used(
    pool: RankPool, backend: str, domains: int
) -> None:
    pool.run(4, use_many_handles, num_domains=domains)


def use_many_handles(rank: Rank) -> None:
    problem = Problem(num_ranks=4, num_domains=rank.num_domains, tokens=(4, 0, 7, 1), hidden=16)
    buffer = ex.make_buffer(rank)
    layers = [problem.rerouted(seed) for seed in range(3)]
    handles = [ex.check_dispatch(buffer, rank, layer) for layer in layers]
    for _ in range(2):
        for layer, handle in zip(reversed(layers), reversed(handles), strict=True):
            ex.check_combine(buffer, rank, layer, (*handle,))
    buffer.destroy()


def test_n6_n7_cached_calls_by_position_and_by_name(backend: str) -> None:
    def body(rank: Rank) -> None:
        buffer = ex.make_buffer(rank)
        handle = ex.check_dispatch(buffer, rank, PROBLEM)
        x = put(problems.tokens_of(PROBLEM)[rank.index].x)
        options = {
            "previous_event": None,
            "async_finish": False,
            "allocate_on_comm_stream": False,
        }
        recv_x, *nothing, event = buffer.dispatch(x, handle=handle, **options)
        assert nothing == [None] * 4
        assert event.event is None
        for combined, weights, event in (
            buffer.combine(recv_x, handle),
            buffer.combine(recv_x, handle=handle, topk_weights=None, config=None, **options),
        ):
            assert combined.shape == x.shape
            assert weights is None
            assert event.event is None
        buffer.destroy()

    run_threads(3, body)


def test_n7_weights_that_go_out_and_back_are_the_weights(backend: str) -> None:
    def body(rank: Rank) -> None:
        buffer = ex.make_buffer(rank)
        arguments = arguments_of(buffer, rank)
        recv_x, _, weights, _, handle, _ = buffer.dispatch(**arguments)
        _, returned, _ = buffer.combine(recv_x, handle, topk_weights=weights)
        expected = torch.where(arguments["topk_idx"] >= 0, arguments["topk_weights"], 0.0)
        check_same("weights", returned, expected, rank.index)
        buffer.destroy()

    run_threads(3, body)


def test_n12_ids_of_either_size_straight_from_topk(backend: str) -> None:
    def body(rank: Rank) -> None:
        buffer = ex.make_buffer(rank)
        scores = torch.rand(5, 6, generator=problems.generator(rank.index))
        for dtype in (torch.int64, torch.int32):
            weights, topk_idx = put(scores).topk(2)
            topk_idx = topk_idx.to(dtype)
            per_rank, _, per_expert, in_rank, _ = buffer.get_dispatch_layout(topk_idx, 6)
            _, ids, _, _, handle, _ = buffer.dispatch(
                put(torch.ones(5, 8, dtype=torch.bfloat16)),
                num_tokens_per_rank=per_rank,
                is_token_in_rank=in_rank,
                num_tokens_per_expert=per_expert,
                topk_idx=topk_idx,
                topk_weights=weights,
            )
            assert ids.dtype == dtype
        buffer.destroy()

    run_threads(3, body)


# --- data (D) -------------------------------------------------------------------------------------


def test_d8_inputs_that_are_not_contiguous_are_refused_on_all_ranks() -> None:
    def body(rank: Rank) -> None:
        buffer = ex.make_buffer(rank)
        arguments = arguments_of(buffer, rank)
        if rank.index == 0:
            arguments["x"] = torch.zeros(48, 9, dtype=torch.bfloat16).t()
        with pytest.raises(ContractError if rank.index == 0 else RuntimeError, match="contiguous"):
            buffer.dispatch(**arguments)
        check_works(buffer, rank)

    run_threads(3, body)


def test_d10_inference_tensors_and_tensors_with_gradients_are_taken(backend: str) -> None:
    def body(rank: Rank) -> None:
        buffer = ex.make_buffer(rank)
        arguments = arguments_of(buffer, rank)
        for name in ("x", "topk_weights"):
            arguments[name] = arguments[name].clone().requires_grad_()
        recv_x, _, weights, _, handle, _ = buffer.dispatch(**arguments)
        assert not recv_x.requires_grad
        assert not weights.requires_grad
        buffer.combine(recv_x.requires_grad_(), handle, weights.requires_grad_())
        with torch.inference_mode():
            check_works(buffer, rank)
            x = put(torch.ones(3, 128, dtype=torch.bfloat16))
            ids = put(torch.zeros(3, 1, dtype=torch.int64))
            (recv, _), _, handle, _, _ = buffer.low_latency_dispatch(x, ids, 4, 3)
            combined, _, _ = buffer.low_latency_combine(
                recv.bfloat16(), ids, put(torch.ones(3, 1)), handle
            )
            assert (combined == 448).all()
        buffer.destroy()

    run_threads(3, body)


def test_calls_break_the_graphs_of_torch_compile_and_work(backend: str) -> None:
    """Section 9."""
    run_threads(1, call_compiled)


def call_compiled(rank: Rank) -> None:
    buffer = ex.make_buffer(rank)
    x = put(torch.ones(3, 128, dtype=torch.bfloat16))
    topk_idx, weights = put(torch.zeros(3, 1, dtype=torch.int64)), put(torch.ones(3, 1))

    @torch.compile(backend="eager")
    def layer(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        per_rank, _, per_expert, in_rank, _ = buffer.get_dispatch_layout(topk_idx, 2)
        recv_x, _, _, _, handle, _ = buffer.dispatch(
            x * 2,
            num_tokens_per_rank=per_rank,
            is_token_in_rank=in_rank,
            num_tokens_per_expert=per_expert,
            topk_idx=topk_idx,
            topk_weights=weights,
        )
        first = buffer.combine(recv_x + 1, handle)[0]
        recv_x, _, handle, _, hook = buffer.low_latency_dispatch(
            first, topk_idx, 3, 2, return_recv_hook=True
        )
        hook()
        rows = recv_x[0].float() * recv_x[1].repeat_interleave(128, dim=2)
        second, _, hook = buffer.low_latency_combine(
            (rows * 2).bfloat16(), topk_idx, weights, handle, return_recv_hook=True
        )
        hook()
        return first, second

    first, second = layer(x)
    assert (first == 3).all()
    assert (second == 6).all()
    buffer.destroy()
