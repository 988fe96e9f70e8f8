"""What programs take for granted about names, signatures, attributes, estimates and handles."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import inspect
import weakref
from typing import Any

import pytest
import torch

import deep_ep
import exchange as ex
import problem as problems
from deep_ep import EPBuffer, EPHandle, EventHandle, EventOverlap
from exchange import Call
from problem import Problem
from ranks import Rank, run_threads

PROBLEM = Problem(num_ranks=2, tokens=(6, 3), hidden=16)

# --- names (clients.md, section 1) ----------------------------------------------------------------

NAMES = [
    "EPBuffer",
    "EPHandle",
    "EventHandle",
    "EventOverlap",
    "comm",
    "get_logical_domain_size",
    "get_num_allocation_alignment",
    "get_num_rdma_alignment",
    "get_num_tma_alignment",
    "get_physical_domain_size",
    "topk_idx_t",
]


@pytest.mark.parametrize("name", NAMES)
def test_the_package_has(name: str) -> None:
    """I1, I7."""
    assert hasattr(deep_ep, name)
    assert name in dir(deep_ep)
    exec(f"from deep_ep import {name}", {})


def test_a_name_that_is_not_offered_is_an_import_error() -> None:
    """I6."""
    assert not hasattr(deep_ep, "HybridEPBuffer")
    with pytest.raises(ImportError):
        exec("from deep_ep import HybridEPBuffer", {})


def test_modules_of_the_original_lead_to_the_same_objects() -> None:
    """I2, I4, I5."""
    places = {
        "deep_ep.utils": (EventHandle, EventOverlap),
        "deep_ep.utils.event": (EventHandle, EventOverlap),
        "deep_ep.buffers.ep": (EPBuffer, EPHandle),
        "deep_ep.comm": (deep_ep.get_physical_domain_size, deep_ep.get_logical_domain_size),
        "deep_ep.utils.envs": (deep_ep.get_physical_domain_size,),
    }
    for module, objects in places.items():
        for thing in objects:
            assert getattr(importlib.import_module(module), thing.__name__) is thing


def test_the_distribution_can_be_found_and_names_its_version() -> None:
    """I9, I11."""
    assert importlib.util.find_spec("deep_ep") is not None
    version = importlib.metadata.version("deep_ep")
    assert version == deep_ep.__version__
    assert version.startswith("2.5.")


def test_constants_are_those_of_the_original() -> None:
    sizes = (
        deep_ep.get_num_allocation_alignment(),
        deep_ep.get_num_rdma_alignment(),
        deep_ep.get_num_tma_alignment(),
    )
    assert sizes == (2 << 20, 64, 32)
    assert deep_ep.topk_idx_t is torch.int64


def test_the_namespace_of_clients_operators_is_left_alone() -> None:
    """Section 9: a client registers torch.library operators called deepep::dispatch."""
    library = torch.library.Library("deepep", "DEF")
    library.define("dispatch(Tensor x) -> Tensor")


# --- signatures -----------------------------------------------------------------------------------

REQUIRED = inspect.Parameter.empty
SIGNATURES: dict[str, dict[str, Any]] = {
    "__init__": {
        "group": REQUIRED,
        "num_bytes": None,
        "num_max_tokens_per_rank": 0,
        "hidden": 0,
        "num_topk": 0,
        "use_fp8_dispatch": False,
        "lb_allocation_plan_or_num_bytes": 0,
        "deterministic": False,
        "allow_hybrid_mode": True,
        "allow_multiple_reduction": True,
        "prefer_overlap_with_compute": True,
        "sl_idx": None,
        "num_allocated_qps": 0,
        "num_cpu_timeout_secs": 300,
        "num_gpu_timeout_secs": 100,
        "explicitly_destroy": False,
        "device": None,  # ours
    },
    "get_buffer_size_hint": {
        "group": REQUIRED,
        "num_max_tokens_per_rank": REQUIRED,
        "hidden": REQUIRED,
        "num_topk": 0,
        "use_fp8_dispatch": False,
        "allow_hybrid_mode": True,
        "allow_multiple_reduction": True,
    },
    "get_theoretical_num_sms": {
        "num_experts": REQUIRED,
        "num_topk": REQUIRED,
        "num_scaleout_topk": 0,
        "rdma_gbs": 0,
        "nvlink_gbs": 0,
        "sm_read_gbs": 0,
        "sm_write_gbs": 0,
    },
    "get_theoretical_num_qps": {"num_sms": REQUIRED},
    "dispatch": {
        "x": REQUIRED,
        "topk_idx": None,
        "topk_weights": None,
        "cumulative_local_expert_recv_stats": None,
        "num_experts": None,
        "num_max_tokens_per_rank": None,
        "expert_alignment": None,
        "num_sms": 0,
        "num_qps": 0,
        "previous_event": None,
        "async_with_compute_stream": False,
        "allocate_on_comm_stream": False,
        "handle": None,
        "do_handle_copy": False,
        "do_cpu_sync": None,
        "do_expand": False,
        "do_zero_padding": False,
        "use_tma_aligned_col_major_sf": False,
        "defer_epilogue": False,
    },
    "combine": {
        "x": REQUIRED,
        "handle": REQUIRED,
        "topk_weights": None,
        "bias": None,
        "num_sms": 0,
        "num_qps": 0,
        "previous_event": None,
        "async_with_compute_stream": False,
        "allocate_on_comm_stream": False,
        "defer_epilogue": False,
    },
    "destroy": {},
    "capture": {},
}


@pytest.mark.parametrize("name", SIGNATURES)
def test_parameters_have_the_names_order_and_defaults_of_the_original(name: str) -> None:
    """I10, C2, C3, X1, X2."""
    parameters = dict(inspect.signature(getattr(EPBuffer, name)).parameters)
    parameters.pop("self", None)
    assert {key: value.default for key, value in parameters.items()} == SIGNATURES[name]
    assert list(parameters) == list(SIGNATURES[name])
    assert all(p.kind is p.POSITIONAL_OR_KEYWORD for p in parameters.values())


def test_unknown_keywords_are_a_type_error(backend: str) -> None:
    def body(rank: Rank) -> None:
        with pytest.raises(TypeError):
            ex.make_buffer(rank, PROBLEM, use_nvfp4=True)
        buffer = ex.make_buffer(rank, PROBLEM)
        with pytest.raises(TypeError):
            buffer.dispatch(torch.zeros(1, 16), overlap=True)
        buffer.destroy()

    run_threads(2, body)


def test_the_buffer_is_an_ordinary_class(backend: str) -> None:
    """I10: isinstance, weak references, and a replaced __init__."""
    assert inspect.isclass(EPBuffer)

    class Wrapped(EPBuffer):
        def __init__(self, group: object) -> None:
            super().__init__(group, num_max_tokens_per_rank=4, hidden=16)

    def body(rank: Rank) -> None:
        buffer = Wrapped(rank.group)
        assert isinstance(buffer, EPBuffer)
        reference = weakref.ref(buffer)
        assert reference() is buffer
        del buffer
        assert reference() is None  # no cycle keeps it

    run_threads(2, body)


# --- attributes -----------------------------------------------------------------------------------


def test_attributes_tell_how_the_buffer_was_made(backend: str) -> None:
    """C4, G5."""

    def body(rank: Rank) -> None:
        buffer = EPBuffer(rank.group, num_bytes=4 << 20, num_max_tokens_per_rank=32, hidden=16)
        assert buffer.group is rank.group
        assert (buffer.rank_idx, buffer.num_ranks) == (rank.index, 4)
        assert (buffer.num_bytes, buffer.num_lb_bytes) == (4 << 20, 0)
        assert buffer.num_max_tokens_per_rank == 32
        assert (buffer.num_scaleout_ranks, buffer.num_scaleup_ranks) == (2, 2)
        assert (buffer.scaleout_rank_idx, buffer.scaleup_rank_idx) == divmod(rank.index, 2)
        assert (buffer.num_rdma_ranks, buffer.num_nvlink_ranks) == (2, 2)
        flags = (buffer.allow_hybrid_mode, buffer.allow_multiple_reduction)
        flags += (buffer.prefer_overlap_with_compute, buffer.deterministic)
        assert flags == (True, True, True, False)
        assert buffer.num_allocated_qps >= 1
        assert buffer.explicitly_destroy is False
        assert buffer.runtime is not None
        buffer.destroy()

    run_threads(4, body, num_domains=2)


def test_domain_sizes_are_told_of_groups_and_of_buffers(run: Any, backend: str) -> None:  # noqa: ANN401
    """C109: from what identifies the hosts of the ranks."""
    run(4, compare_domain_sizes, num_domains=2)
    run(3, compare_domain_sizes)


def compare_domain_sizes(rank: Rank) -> None:
    physical = (rank.num_domains, rank.size // rank.num_domains)
    assert deep_ep.get_physical_domain_size(rank.group) == physical
    assert deep_ep.get_logical_domain_size(rank.group) == physical
    assert deep_ep.get_logical_domain_size(rank.group, False) == (1, rank.size)
    buffer = ex.make_buffer(rank, PROBLEM, Call(allow_hybrid_mode=False))
    assert deep_ep.get_physical_domain_size(buffer) == physical
    assert deep_ep.get_logical_domain_size(buffer) == (1, rank.size)
    assert EPBuffer.get_physical_domain_size(rank.group) == physical
    buffer.destroy()


def test_a_barrier_of_a_buffer_lets_all_ranks_through(run: Any, backend: str) -> None:  # noqa: ANN401
    run(3, pass_barriers)


def pass_barriers(rank: Rank) -> None:
    buffer = ex.make_buffer(rank, PROBLEM)
    deep_ep.comm.barrier(buffer)
    deep_ep.comm.barrier(buffer, wait_comm_stream=False, with_cpu_sync=True, sequential=False)
    buffer.barrier()
    deep_ep.comm.get_comm_stream(buffer)
    buffer.destroy()


# --- sizes and estimates --------------------------------------------------------------------------


def test_a_buffer_has_the_bytes_that_the_hint_names(backend: str) -> None:
    """C2: a size and the settings it was computed from may be given together."""

    def body(rank: Rank) -> None:
        hint = EPBuffer.get_buffer_size_hint(rank.group, 64, 256, num_topk=4)
        assert ex.make_buffer(rank, Problem(tokens=64, hidden=256)).num_bytes == hint
        both = EPBuffer(rank.group, hint, num_max_tokens_per_rank=64, hidden=256)
        assert (both.num_bytes, both.num_max_tokens_per_rank) == (hint, 64)

    run_threads(2, body)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"num_bytes": 0},
        {"num_bytes": -(2 << 20)},
        {"num_bytes": (2 << 20) + 1},
        {"num_max_tokens_per_rank": 8},
        {"hidden": 8},
        {"num_max_tokens_per_rank": -8, "hidden": 8},
        {"num_max_tokens_per_rank": 8, "hidden": 8, "num_topk": -1},
    ],
    ids=lambda s: "_".join(f"{k}{v}" for k, v in s.items()) or "nothing",
)
def test_impossible_sizes_are_refused(backend: str, settings: dict[str, int]) -> None:
    def body(rank: Rank) -> None:
        with pytest.raises(ValueError, match=r"num_bytes|num_max_tokens_per_rank|hidden|num_topk"):
            EPBuffer(rank.group, **settings)

    run_threads(2, body)


@pytest.mark.parametrize("size", [(1, 1), (2, 1), (6, 1), (4, 2), (6, 3)], ids=str)
def test_estimates_are_even_and_never_divide_by_zero(backend: str, size: tuple[int, int]) -> None:
    """X5, G7."""

    def body(rank: Rank) -> None:
        buffer = ex.make_buffer(rank, PROBLEM)
        for experts_per_rank, num_topk in ((1, 1), (1, rank.size), (32, 8), (3, 2)):
            num_experts = experts_per_rank * rank.size
            num_sms = buffer.get_theoretical_num_sms(num_experts, min(num_topk, num_experts))
            assert num_sms >= 4
            assert num_sms % 2 == 0
        by_name = buffer.get_theoretical_num_sms(num_experts=8 * rank.size, num_topk=8)
        assert by_name == buffer.get_theoretical_num_sms(8 * rank.size, 8)
        assert buffer.get_theoretical_num_qps(8) >= 1
        eager = ex.make_buffer(rank, PROBLEM, prefer_overlap_with_compute=False)
        assert eager.get_theoretical_num_sms(8 * rank.size, 8) >= 64

    run_threads(size[0], body, num_domains=size[1])


def test_queue_pairs_follow_the_documented_rule(backend: str) -> None:
    def body(rank: Rank) -> None:
        direct = ex.make_buffer(rank, PROBLEM, allow_hybrid_mode=False)
        assert [direct.get_theoretical_num_qps(n) for n in (4, 8, 24)] == [4, 8, 9]
        hybrid = ex.make_buffer(rank, PROBLEM, num_allocated_qps=100)
        assert [hybrid.get_theoretical_num_qps(n) for n in (4, 8)] == [65, 100]
        arguments = ex.dispatch_arguments(
            problems.tokens_of(PROBLEM)[rank.index], problems.exchange_of(PROBLEM), Call()
        )
        with pytest.raises(ValueError, match="llocated QPs are not enough"):
            hybrid.dispatch(**arguments, num_qps=101)
        hybrid.dispatch(**arguments, num_qps=100)

    run_threads(2, body)


# --- calls ----------------------------------------------------------------------------------------


def test_a_handle_watches_the_tensor_that_it_refers_to(backend: str) -> None:
    def body(rank: Rank) -> None:
        buffer = ex.make_buffer(rank, PROBLEM)
        exchange = problems.exchange_of(PROBLEM)
        arguments = ex.dispatch_arguments(exchange.tokens[rank.index], exchange, Call())
        topk_idx = arguments["topk_idx"] = arguments["topk_idx"].clone()
        handle = buffer.dispatch(**arguments)[3]
        assert handle.topk_idx is topk_idx
        topk_idx.fill_(0)
        with pytest.raises(AssertionError, match="modified"):
            _ = handle.topk_idx

    run_threads(2, body)


def test_a_handle_names_the_sms_that_its_dispatch_used(backend: str) -> None:
    """X4: and the number is accepted back."""

    def body(rank: Rank) -> None:
        buffer = ex.make_buffer(rank, PROBLEM)
        handle = ex.check_dispatch(buffer, rank, PROBLEM, Call())[3]
        assert handle.num_sms >= 1
        ex.check_combine(buffer, rank, PROBLEM, Call(num_sms=handle.num_sms), handle)
        handle = ex.check_dispatch(buffer, rank, PROBLEM, Call(num_sms=6))[3]
        assert handle.num_sms == 6
        buffer.destroy()

    run_threads(2, body)


def test_outputs_share_no_memory_with_handle_or_buffer(backend: str) -> None:
    """X10: the caller may write into what it received, and the handle stays right."""

    def body(rank: Rank) -> None:
        buffer = ex.make_buffer(rank, PROBLEM)
        x, ids, weights, handle = ex.check_dispatch(buffer, rank, PROBLEM, Call())
        for tensor in (x, ids, weights):
            tensor.fill_(1)
        ex.check_combine(buffer, rank, PROBLEM, Call(), handle)
        ex.check_dispatch(buffer, rank, PROBLEM.rerouted(1), Call())
        assert all((tensor == 1).all() for tensor in (x, ids, weights))
        buffer.destroy()

    run_threads(2, body)


def test_tensors_of_inference_mode_and_with_gradients_are_taken(backend: str) -> None:
    """D10."""

    def body(rank: Rank) -> None:
        buffer = ex.make_buffer(rank, PROBLEM)
        exchange = problems.exchange_of(PROBLEM)
        arguments = ex.dispatch_arguments(exchange.tokens[rank.index], exchange, Call())
        with torch.inference_mode():
            fresh = {k: v.clone() for k, v in arguments.items() if isinstance(v, torch.Tensor)}
            x, _, _, handle, _ = buffer.dispatch(**arguments | fresh)
            assert handle.topk_idx is fresh["topk_idx"]
            buffer.combine(x, handle)
        for name in ("x", "topk_weights"):
            arguments[name] = arguments[name].clone().requires_grad_()
        x, _, weights, handle, _ = buffer.dispatch(**arguments)
        assert not x.requires_grad
        buffer.combine(x.requires_grad_(), handle, topk_weights=weights.requires_grad_())
        buffer.destroy()

    run_threads(2, body)


def test_a_handle_that_was_moved_about_still_works(backend: str) -> None:
    """X14: kept in a dict by its id, in an attribute, shared by two names, freed when dropped."""

    def body(rank: Rank) -> None:
        buffer = ex.make_buffer(rank, PROBLEM)
        handle = ex.check_dispatch(buffer, rank, PROBLEM, Call())[3]
        kept = {id(handle): handle}
        reference = weakref.ref(handle)
        ex.check_combine(buffer, rank, PROBLEM, Call(), kept[id(handle)])
        del handle
        kept.clear()
        assert reference() is None
        buffer.destroy()

    run_threads(2, body)


def test_lent_memory_outlives_the_buffer(backend: str) -> None:
    def body(rank: Rank) -> None:
        buffer = ex.make_buffer(rank, PROBLEM)
        lent = buffer.empty((3, 5, 2), torch.bfloat16)
        assert lent.shape == (3, 5, 2)
        assert lent.is_contiguous()
        assert buffer.empty(4, torch.int32).shape == (4,)
        assert buffer.empty((0, 8), torch.float32).shape == (0, 8)
        received = ex.check_dispatch(buffer, rank, PROBLEM, Call())[0]
        lent.fill_(3)
        copy = received.clone()
        buffer.destroy()
        del buffer
        assert (lent == 3).all()
        ex.check_same("recv_x after destroy", received, copy, rank.index)

    run_threads(2, body)
