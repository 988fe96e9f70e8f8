"""Where the tensors of a buffer lie: the CPU, or a GPU by its number. Loads no torch."""

from __future__ import annotations

import importlib.util
import os
import sys
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from deep_ep import _core
from deep_ep._core import ContractError

if TYPE_CHECKING:
    import torch

CPU = -1


def ordinal_of(device: torch.device | str | int | None) -> int:
    """The number of the GPU that `device` names; CPU for the CPU.

    None: what `EP_DEVICE` says, else the current GPU of torch if torch is loaded and sees one, else
    the CPU.

    Raises:
        ContractError: It names neither.
    """
    if isinstance(device, int):
        name = f"cuda:{device}"
    elif device is None:
        name = os.environ.get("EP_DEVICE") or ("cuda" if _torch_sees_gpus() else "cpu")
    else:
        name = str(device)
    kind, _, number = name.partition(":")
    if kind == "cpu":
        return CPU
    if kind != "cuda" or not (number.isdigit() or name == "cuda"):
        raise ContractError(f"device must be cpu, cuda or cuda:<number>, got {name}")
    _tell_where_wheels_put_nvrtc()
    if number:
        return int(number)
    return sys.modules["torch"].cuda.current_device() if _torch_sees_gpus() else 0


def _torch_sees_gpus() -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and torch.cuda.is_available()


@cache
def _tell_where_wheels_put_nvrtc() -> None:
    spec = importlib.util.find_spec("nvidia")
    places = spec.submodule_search_locations if spec is not None else ()
    folders = [str(folder) for place in places for folder in sorted(Path(place).glob("*/lib"))]
    _core.set_nvrtc_folders(folders)
