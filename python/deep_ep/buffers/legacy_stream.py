"""Where a call of V1 runs on a GPU: on the caller's stream or on that of the buffer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from deep_ep.device import CPU
from deep_ep.utils.event import EventHandle, EventOverlap

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from deep_ep import _core
    from deep_ep.buffers.ep import EPBuffer

__all__ = ["run_placed"]


def run_placed(
    ep: EPBuffer,
    call: Callable[[], tuple],
    inputs: tuple,
    previous: _core.Event | None,
    is_async: bool,
) -> tuple[tuple, EventOverlap]:
    """Runs a call that puts all its work on the current stream, after what that holds.

    Args:
        ep: The buffer whose calls it makes.
        call: Makes the calls and what goes with them, returns the results.
        inputs: Tensors that the work reads, in any nesting.
        previous: Start after this too.
        is_async: On a GPU run on the buffer's stream; the current one does not wait. CPU ranks are
            done when this returns.

    Returns:
        The results and their event, which holds None for a synchronous call.
    """
    if not is_async or ep.device_idx == CPU:
        _follow(previous, ep.device_idx)
        results = call()
        return results, EventOverlap(EventHandle() if is_async else None)
    caller, comm = torch.cuda.current_stream(ep.device_idx), ep.get_comm_stream()
    with torch.cuda.stream(comm):
        comm.wait_stream(caller)  # also with `previous`: that stream may still use lent memory
        _follow(previous, ep.device_idx)
        results = call()
        event = EventOverlap(EventHandle())
    # Torch gives memory back to the stream that it was made on, unless told who else uses it.
    for tensor in _tensors_in(inputs):
        tensor.record_stream(comm)
    for tensor in _tensors_in(results):
        tensor.record_stream(caller)
    return results, event


def _follow(previous: _core.Event | None, device_idx: int) -> None:
    if previous is not None:
        EventHandle.of(previous, device_idx).current_stream_wait()


def _tensors_in(values: Iterable[Any]) -> Iterable[torch.Tensor]:
    for value in values:
        if isinstance(value, torch.Tensor):
            if value.is_cuda:
                yield value
        elif isinstance(value, tuple | list):
            yield from _tensors_in(value)
