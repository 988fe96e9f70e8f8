"""When the result of a call is ready.

On a GPU waiting makes the current stream wait; on the CPU, where there are no streams, it blocks.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from deep_ep import _core
from deep_ep.device import CPU
from deep_ep.glue import load_torch_glue, outside_graphs

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from types import TracebackType

    import torch

__all__ = ["EventHandle", "EventOverlap"]


_REACHED = _core.Event()
"""What a CPU rank has done so far is done."""


class EventHandle:
    """A point in the work of the ranks.

    A new one marks what the caller has done so far: if the program uses GPUs, what the current
    stream of the current one holds.
    """

    __slots__ = ("__weakref__", "_cuda_device", "_event")

    def __init__(self) -> None:
        self._event, self._cuda_device = _REACHED, CPU
        torch = sys.modules.get("torch")
        if torch is not None and torch.cuda.is_initialized():
            self._cuda_device = torch.cuda.current_device()
            stream = load_torch_glue("EventHandle").current_stream(self._cuda_device)
            self._event = _core.record_event(self._cuda_device, stream)

    @classmethod
    def of(cls, event: _core.Event, cuda_device: int) -> EventHandle:
        """Wraps the event of a call on a GPU, or on the CPU."""
        handle = cls.__new__(cls)
        handle._event, handle._cuda_device = event, cuda_device
        return handle

    def current_stream_wait(self) -> None:
        """Makes the current stream wait for the point; on the CPU blocks until it is reached.

        Raises:
            RuntimeError | TimeoutError: What the work failed with, on each call. On a GPU the next
                call of the buffer, or anything that waits for it, raises that.
        """
        if self._cuda_device == CPU:
            self._event.wait()
        else:
            stream = load_torch_glue("EventHandle").current_stream(self._cuda_device)
            self._event.wait_on(stream)


class EventOverlap:
    """The event of a call, and the rest of that call that waiting runs.

    Attributes:
        event: The point to wait for; None: there is nothing to wait for.
        extra_tensors: Kept alive as long as this object; see `release_handle`.
        hook_after_wait: Runs after the first wait; its result is what every wait returns.
    """

    def __init__(
        self,
        event: EventHandle | None = None,
        extra_tensors: Sequence[torch.Tensor] | None = None,
    ) -> None:
        self.event = event
        self.extra_tensors = extra_tensors
        self.hook_after_wait: Callable[[], Any] | None = None
        self._result: Any = None
        self._release_at_exit = False

    @outside_graphs
    def current_stream_wait(self, release_handle: bool = False) -> Any:  # noqa: ANN401
        """Waits for the event, then runs the hook if it has not run yet.

        Args:
            release_handle: Drop the event and the extra tensors afterwards.

        Returns:
            The result of the hook, the same objects each time; None without a hook. For a call
            with `defer_epilogue` these are its results.

        Raises:
            RuntimeError | TimeoutError: What the call failed with.
        """
        if self.event is not None:
            self.event.current_stream_wait()
        if self.hook_after_wait is not None:
            self._result = self.hook_after_wait()
            self.hook_after_wait = None
        if release_handle:
            self.event = None
            self.extra_tensors = None
        return self._result

    def wait(self) -> Any:  # noqa: ANN401
        """The same as `current_stream_wait()`."""
        return self.current_stream_wait()

    def register_hook_after_wait(self, hook: Callable[[], Any]) -> None:
        """Sets what the first wait is to run.

        Raises:
            ContractError: There is a hook already.
        """
        if self.hook_after_wait is not None:
            raise _core.ContractError("an event takes one hook, and this one has one")
        self.hook_after_wait = hook

    def __call__(self, release_handle: bool = False) -> EventOverlap:
        """For `with event(release_handle=True):`, which also drops the event at its end."""
        self._release_at_exit = release_handle
        return self

    def __enter__(self) -> EventOverlap:
        return self

    def __exit__(
        self,
        exception_type: type[BaseException] | None,
        exception: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Waits, also when the body raised. `wait()` returns the result from then on."""
        release_handle, self._release_at_exit = self._release_at_exit, False
        self.current_stream_wait(release_handle)


def core_event_of(name: str, event: EventHandle | EventOverlap | None) -> _core.Event | None:
    """The library's event behind one of Python; None: nothing to wait for.

    Raises:
        TypeError: `event` is no event.
    """
    inner = event
    while inner is not None and not isinstance(inner, EventHandle):
        if not hasattr(inner, "event"):
            raise TypeError(
                f"{name} must be an EventHandle, an EventOverlap or None, "
                f"got {type(event).__name__}"
            )
        inner = inner.event
    return None if inner is None else inner._event
