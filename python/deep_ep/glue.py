"""The way to `deep_ep.torch`, for modules that must load without torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from types import ModuleType

_glue: ModuleType | None = None


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
        _glue = glue
    return _glue
