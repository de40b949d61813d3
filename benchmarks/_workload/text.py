"""Training text that every machine has, the source of Python's standard library, and batches drawn from it."""

from __future__ import annotations

import hashlib
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor

# Test folders hold odd encodings and machine-made data; packages and caches differ from machine to machine.
_SKIPPED_FOLDERS = frozenset(
    {"test", "tests", "idle_test", "__pycache__", "site-packages", "dist-packages", "lib-dynload", "ensurepip"}
)
# Written when Python was built or by the distribution: they hold the paths and flags of one machine.
_SKIPPED_PREFIXES = ("_sysconfigdata", "sitecustomize", "usercustomize")


@dataclass(frozen=True)
class Text:
    """Text to train on: `data`, uint8 [N], holds the bytes of all files."""

    data: Tensor

    @cached_property
    def sha256(self) -> str:
        """First 12 hex digits of the hash; losses depend on the text, and each version of Python has its own."""
        return hashlib.sha256(memoryview(self.data.numpy())).hexdigest()[:12]

    def batch(self, *, size: int, sequence: int, seed: int, index: int) -> tuple[Tensor, Tensor]:
        """Draw batch `index` of the stream `seed`: tokens, and targets one byte on, both int64 [size, sequence].

        A pure function of its arguments: it does not use torch's default generator.
        """
        if len(self.data) < sequence + 1:
            raise ValueError(f"a sequence of {sequence} needs {sequence + 1} bytes of text; there are {len(self.data)}")
        generator = torch.Generator().manual_seed(seed * 1_000_003 + index)
        starts = torch.randint(len(self.data) - sequence, (size, 1), generator=generator)
        places = starts + torch.arange(sequence)
        return self.data[places].long(), self.data[places + 1].long()


def standard_library(root: Path | None = None) -> Text:
    """Read the modules of this Python's standard library, except tests, in the order of their paths (12 MB).

    Args:
        root: the library's folder; this Python's by default.

    Raises:
        FileNotFoundError: there is no source.
    """
    root = Path(sysconfig.get_path("stdlib")) if root is None else root
    data = bytearray()
    for path in sources(root):
        data += path.read_bytes()
    if not data:
        raise FileNotFoundError(
            f"no Python source to read below {str(root)!r}, which should be the standard library; "
            "install the library's source files (some minimal images leave only compiled ones)"
        )
    return Text(torch.frombuffer(data, dtype=torch.uint8))


def sources(root: Path) -> Iterator[Path]:
    """List every `*.py` below `root` outside the skipped folders, sorted by relative path in POSIX form."""
    found = (path for path in root.rglob("*.py") if path.is_file() and _wanted(path.relative_to(root)))
    yield from sorted(found, key=lambda path: path.relative_to(root).as_posix())


def _wanted(relative: Path) -> bool:
    return not (_SKIPPED_FOLDERS.intersection(relative.parts[:-1]) or relative.name.startswith(_SKIPPED_PREFIXES))
