"""The way to `deep_ep.torch`, for modules that must load without torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FunctionType, ModuleType

    AnyFunction = TypeVar("AnyFunction", bound=Callable[..., object])

_glue: ModuleType | None = None
_outside_graphs: list[FunctionType] = []


def outside_graphs(function: AnyFunction) -> AnyFunction:
    """Keeps a function out of the graphs of `torch.compile`, which cannot call the C++ library."""
    function._torchdynamo_disable = True  # what torch.compiler.disable sets; importing it takes 1 s
    _outside_graphs.append(function)
    if _glue is not None:
        _glue.skip_when_compiling(function)
    return function


def load_torch_glue(user: str) -> ModuleType:
    """Returns `deep_ep.torch`.

    Args:
        user: What needs it, for the message.

    Raises:
        ImportError: torch is not installed.
    """
    global _glue
    if _glue is None:  # an import statement would cost a call 2 us
        try:
            from . import torch as glue
        except ModuleNotFoundError as error:
            if error.name != "torch":
                raise
            raise ImportError(f"{user} needs torch: pip install torch", name="torch") from error
        for function in _outside_graphs:
            glue.skip_when_compiling(function)
        _glue = glue
    return _glue
