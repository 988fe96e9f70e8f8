"""Torch tensors and process groups as the C++ library sees them. Not for users of the package."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import torch
from torch.utils.dlpack import from_dlpack

from . import _core
from .device import CPU

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FunctionType

DTYPES = {
    torch.uint8: _core.DType.uint8,
    torch.int32: _core.DType.int32,
    torch.int64: _core.DType.int64,
    torch.float32: _core.DType.float32,
    torch.bfloat16: _core.DType.bfloat16,
    torch.float8_e4m3fn: _core.DType.float8_e4m3fn,
}

# Without the stream object around it, which takes a microsecond to make.
_raw_stream: Callable[[int], int] | None = getattr(torch._C, "_cuda_getCurrentRawStream", None)


def topk_idx_dtype() -> torch.dtype:
    """`torch.int64`, or `torch.int32` if `EP_NUM_TOPK_IDX_BITS` is 32; calls take either."""
    return torch.int32 if os.environ.get("EP_NUM_TOPK_IDX_BITS") == "32" else torch.int64


def to_core_dtype(name: str, dtype: torch.dtype) -> _core.DType:
    """The library's name of a dtype.

    Raises:
        TypeError: `dtype` is no torch dtype.
        ContractError: The library has no such dtype.
    """
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"{name} must have a torch.dtype, got {type(dtype).__name__}")
    if dtype not in DTYPES:
        known = ", ".join(str(known).removeprefix("torch.") for known in DTYPES)
        raise _core.ContractError(f"{name} must have one of the dtypes {known}, got {dtype}")
    return DTYPES[dtype]


def view_of(name: str, tensor: torch.Tensor | None) -> _core.TensorView | None:
    """Borrows a tensor: address, dtype, shape and strides, whatever autograd knows about it.

    Raises:
        TypeError: `tensor` is neither a tensor nor None.
        ContractError: The library cannot address it: see the message.
    """
    if tensor is None:
        return None
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"{name} must be a torch.Tensor, got {type(tensor).__name__}")
    dtype = DTYPES.get(tensor.dtype)
    if dtype is None:
        dtype = to_core_dtype(name, tensor.dtype)
    if not (tensor.is_cpu or tensor.is_cuda) or tensor.layout is not torch.strided:
        raise _core.ContractError(
            f"{name} must be a dense tensor on the CPU or a GPU, "
            f"got {tensor.layout} on {tensor.device}"
        )
    return _core.make_view(
        tensor.data_ptr(), dtype, tensor.shape, tensor.stride(), tensor.get_device()
    )


def to_torch(tensor: _core.Tensor | None) -> torch.Tensor | None:
    """A torch tensor over memory of the library, which it keeps alive; nothing is copied."""
    if tensor is None:
        return None
    result = from_dlpack(tensor.__dlpack__())
    if tensor.dtype is _core.DType.float8_e4m3fn:
        return result.view(torch.float8_e4m3fn)
    return result


def current_stream(cuda_device: int) -> int:
    """The `CUstream` that torch uses now on this thread; 0 on the CPU."""
    if cuda_device == CPU:
        return 0
    if _raw_stream is not None:
        return _raw_stream(cuda_device)
    return torch.cuda.current_stream(cuda_device).cuda_stream


def skip_when_compiling(function: FunctionType) -> None:
    """Makes `torch.compile` run a function, and what it calls, as it is."""
    try:
        from torch._C._dynamo import eval_frame

        skip = eval_frame._FrameAction.SKIP
        strategy = eval_frame._FrameExecStrategy(skip, skip)
        eval_frame.set_code_exec_strategy(function.__code__, strategy)
    except (ImportError, AttributeError):
        return  # another torch: calls in compiled functions may not work, all others do


def all_gather_through(group: object) -> Callable[[bytes], list[bytes]]:
    """A function that gathers one message of each rank of a torch process group."""

    def all_gather(message: bytes) -> list[bytes]:
        messages: list[bytes] = [b""] * group.size()
        # Found at call time: wrappers of process groups replace functions of torch.distributed.
        torch.distributed.all_gather_object(messages, message, group=group)
        return messages

    return all_gather
