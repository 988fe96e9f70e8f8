"""Sizes, FP8 quantisation and comparisons that programs around a buffer need."""

from __future__ import annotations

from typing import TYPE_CHECKING

from deep_ep._core import ContractError

if TYPE_CHECKING:
    import torch

    Nested = torch.Tensor | tuple["Nested", ...] | list["Nested"] | None

FP8_MAX = 448.0
"""The largest float8_e4m3fn."""


def get_num_allocation_alignment() -> int:
    """The size of a buffer is a multiple of this, in bytes."""
    return 2 * 1024 * 1024


def get_num_rdma_alignment() -> int:
    """What a network wants data to be aligned to, in bytes."""
    return 64


def get_num_tma_alignment() -> int:
    """What bulk copies of a GPU want data to be aligned to, in bytes."""
    return 32


def ceil_div(x: int, y: int) -> int:
    """`x / y`, rounded up."""
    return -(-x // y)


def align(x: int, y: int) -> int:
    """The smallest multiple of `y` that is at least `x`."""
    return ceil_div(x, y) * y


def safe_div(x: float, y: float) -> float:
    """`x / y`, 0 if `y` is 0."""
    return x / y if y else 0.0


def calc_diff(x: torch.Tensor, y: torch.Tensor) -> float:
    """How much two tensors of one shape differ: 0 if equal, about the squared relative error."""
    x, y = x.double() + 1, y.double() + 1  # + 1: tensors of zeros compare too
    total = (x.square() + y.square()).sum()
    return (x - y).square().sum().div(total).item() if x.numel() else 0.0


def per_token_cast_to_fp8(
    x: torch.Tensor, gran_k: int = 128, use_packed_ue8m0: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantises each group of `gran_k` channels of a token with its own scale.

    Args:
        x: `[T, H]` of a floating-point dtype, H a multiple of `gran_k`.
        gran_k: Channels that share a scale.
        use_packed_ue8m0: Round scales up to powers of two and pack the exponents of four of them
            into an int32, the first one lowest; H is then a multiple of `4 * gran_k`.

    Returns:
        `[T, H]` float8_e4m3fn, and scales: `[T, H / gran_k]` float32, or `[T, H / gran_k / 4]`
        int32. Value = quantised value * scale.

    Raises:
        ContractError: H is no such multiple.
    """
    import torch

    num_tokens, hidden = x.shape
    unit = gran_k * 4 if use_packed_ue8m0 else gran_k
    if hidden % unit != 0:
        raise ContractError(f"the hidden size must be a multiple of {unit}, got {hidden}")
    groups = x.float().view(num_tokens, hidden // gran_k, gran_k)
    scales = groups.abs().amax(dim=2).clamp(min=1e-4) / FP8_MAX
    if use_packed_ue8m0:
        # Any mantissa bit carries into the exponent, then all are cleared: exact.
        bits = (scales.view(torch.int32) + 0x7FFFFF) & 0x7F800000
        scales = bits.view(torch.float32)
    data = (groups / scales.unsqueeze(2)).to(torch.float8_e4m3fn).view(num_tokens, hidden)
    if use_packed_ue8m0:
        exponents = (scales.view(torch.int32) >> 23).to(torch.uint8)
        scales = exponents.contiguous().view(torch.int32)
    return data, scales


def per_token_cast_back(x: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Undoes `per_token_cast_to_fp8`.

    Args:
        x: `[T, H]` float8_e4m3fn.
        scales: `[T, P]` float32, or int32 that pack four UE8M0 exponents each; any strides.

    Returns:
        `[T, H]` bfloat16.

    Raises:
        ContractError: H is no multiple of the number of scales.
    """
    import torch

    num_tokens, hidden = x.shape
    if scales.dtype == torch.int32:
        exponents = scales.contiguous().view(torch.uint8).int()
        scales = (exponents << 23).view(torch.float32)
    num_scales = scales.shape[1]
    if num_scales == 0 or hidden % num_scales != 0:
        raise ContractError(
            f"the hidden size must be a multiple of the scales of a token, "
            f"got {hidden} and {num_scales}"
        )
    groups = x.float().view(num_tokens, num_scales, hidden // num_scales)
    return (groups * scales.unsqueeze(2)).view(num_tokens, hidden).bfloat16()


def count_bytes(*tensors: Nested) -> int:
    """Bytes of tensors, of tuples and lists of them; None counts 0."""
    total = 0
    for tensor in tensors:
        if isinstance(tensor, tuple | list):
            total += count_bytes(*tensor)
        elif tensor is not None:
            total += tensor.numel() * tensor.element_size()
    return total


def inplace_unique(x: torch.Tensor, num_slots: int) -> None:
    """Replaces each row by its distinct values in ascending order, then -1.

    Args:
        x: `[T, K]` of an integer dtype; negative values count as none.
        num_slots: Values are less than this.
    """
    import torch

    # A value that is none or repeats its neighbour sorts behind all values.
    values = torch.where(x < 0, num_slots, x).sort(dim=1).values
    values[:, 1:].masked_fill_(values[:, 1:] == values[:, :-1], num_slots)
    values = values.sort(dim=1).values
    x.copy_(values.masked_fill_(values >= num_slots, -1))


def hash_tensor(tensor: torch.Tensor) -> int:
    """A 64-bit hash of the elements, bit for bit."""
    from hashlib import blake2b

    import torch

    data = tensor.detach().cpu().contiguous().flatten().view(torch.uint8)
    return int.from_bytes(blake2b(bytes(data.tolist()), digest_size=8).digest(), "little")


def hash_tensors(*tensors: torch.Tensor | None) -> int:
    """A 64-bit hash of several tensors in order; None counts too."""
    from hashlib import blake2b

    hashes = [0 if tensor is None else hash_tensor(tensor) for tensor in tensors]
    joined = b"".join(value.to_bytes(8, "little") for value in hashes)
    return int.from_bytes(blake2b(joined, digest_size=8).digest(), "little")
