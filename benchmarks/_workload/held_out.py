"""The standard library's text in two parts, to train on and to validate on: no file, and no package, is in both."""

from __future__ import annotations

import hashlib
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from .text import Text, sources

# One in so many of the library's modules and packages is held out: half a megabyte of twelve.
_HELD_OUT_OF = 20
# Seed of the validation batches; no training seed shares them, since those draw from the other text.
_VALIDATION_SEED = 0


def split_library(root: Path | None = None) -> tuple[Text, Text]:
    """Split this Python's standard library into the text to train on and the held-out text.

    Files of one package resemble each other (the tables of `encodings` nearly to the letter), so a package is on one
    side as a whole. A hash of its name decides, on every machine and in every version of Python alike.

    Args:
        root: the library's folder; this Python's by default.

    Raises:
        FileNotFoundError: either part would be empty.
    """
    root = Path(sysconfig.get_path("stdlib")) if root is None else root
    parts = bytearray(), bytearray()
    for path in sources(root):
        parts[is_held_out(path.relative_to(root).parts[0])].extend(path.read_bytes())
    if not all(parts):
        raise FileNotFoundError(
            f"the Python source below {str(root)!r} has {len(parts[0])} bytes to train on and {len(parts[1])} to "
            "validate on, and both are needed; install the standard library's source files"
        )
    training, validation = (Text(torch.frombuffer(part, dtype=torch.uint8)) for part in parts)
    return training, validation


def is_held_out(name: str) -> bool:
    """Decide whether a top-level module's file or a package's folder is for validation."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "big") % _HELD_OUT_OF == 0


def validation_batches(text: Text, *, size: int, sequence: int, count: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Draw the batches that validate every arm and seed: tokens and targets, int64 [size, sequence]."""
    for index in range(count):
        yield text.batch(size=size, sequence=sequence, seed=_VALIDATION_SEED, index=index)
