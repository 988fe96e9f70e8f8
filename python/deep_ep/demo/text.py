"""The text that the demo learns: the sources of the Python standard library."""

from __future__ import annotations

import sysconfig
from dataclasses import dataclass
from pathlib import Path

import torch

_MAX_BYTES = 1 << 20


@dataclass(frozen=True)
class Text:
    """Bytes to learn from, and where they are from.

    Attributes:
        data: `[num_bytes]` uint8.
        source: for the reader of the demo's output.
    """

    data: torch.Tensor
    source: str

    def batch(self, step: int, num_sequences: int, length: int) -> torch.Tensor:
        """The windows of a training step, `[num_sequences, length + 1]` int64, from its number."""
        generator = torch.Generator().manual_seed(step)
        starts = torch.randint(len(self.data) - length, (num_sequences, 1), generator=generator)
        return self.data[starts + torch.arange(length + 1)].long()


def load_text() -> Text:
    """Reads the top-level modules of the standard library by name, 1 MiB at most.

    Raises:
        FileNotFoundError: this Python has no readable standard library sources.
    """
    folder = Path(sysconfig.get_paths()["stdlib"])
    pieces: list[bytes] = []
    num_bytes = 0
    for path in sorted(folder.glob("*.py")):
        pieces.append(path.read_bytes()[: _MAX_BYTES - num_bytes])
        num_bytes += len(pieces[-1])
        if num_bytes >= _MAX_BYTES:
            break
    if num_bytes < 1 << 16:
        raise FileNotFoundError(f"no Python sources to learn from in {folder}")
    data = torch.frombuffer(bytearray(b"".join(pieces)), dtype=torch.uint8)
    return Text(data, f"{folder}/*.py, the first {len(pieces)} by name, {num_bytes} bytes")
