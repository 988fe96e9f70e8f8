"""Expert-parallel communication for mixture-of-experts models: dispatch and combine.

`EPBuffer` is where to start. Importing this package loads no torch, touches no device and starts no
thread; what works on tensors needs torch once it is used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from . import comm
from ._core import ContractError
from .buffers.ep import EPBuffer, EPHandle
from .comm import get_logical_domain_size, get_physical_domain_size
from .utils.event import EventHandle, EventOverlap
from .utils.math import (
    get_num_allocation_alignment,
    get_num_rdma_alignment,
    get_num_tma_alignment,
)

if TYPE_CHECKING:
    import torch

    from .buffers.legacy import Buffer

    topk_idx_t: torch.dtype
    __version__: str

__all__ = [
    "Buffer",
    "ContractError",
    "EPBuffer",
    "EPHandle",
    "EventHandle",
    "EventOverlap",
    "__version__",
    "comm",
    "get_logical_domain_size",
    "get_num_allocation_alignment",
    "get_num_rdma_alignment",
    "get_num_tma_alignment",
    "get_physical_domain_size",
    "topk_idx_t",
]


def __getattr__(name: str) -> object:
    """What needs torch or the package's metadata, made when it is first asked for."""
    if name == "topk_idx_t":
        from .glue import load_torch_glue

        return load_torch_glue("deep_ep.topk_idx_t").topk_idx_dtype()
    if name == "Buffer":
        from .buffers.legacy import Buffer

        globals()["Buffer"] = Buffer
        return Buffer
    if name == "__version__":
        from importlib.metadata import PackageNotFoundError, version

        try:
            value = version("deep_ep")
        except PackageNotFoundError:
            value = "0.0.0+unknown"  # files on the path, not installed
        globals()["__version__"] = value
        return value
    raise AttributeError(f"module 'deep_ep' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
