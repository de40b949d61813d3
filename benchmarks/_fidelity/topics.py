"""Topics: classification of source text by the package that it is from, on what PyTorch itself ships.

The labels are real, as a newsgroup is that of its messages; files are held out as a whole; and nothing of it is in the
text that the classifier is trained on before. Every machine that runs this has it.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor

from .._workload.text import Text, sources

# Packages below `torch` of half a megabyte or more, in fifty files or more.
TOPICS = ("_dynamo", "_functorch", "_inductor", "ao", "distributed", "fx", "nn", "onnx", "testing", "utils")
# One in so many files is held out.
_HELD_OUT_OF = 5


@dataclass(frozen=True)
class Topics:
    """Text of each topic, in the order of `TOPICS`."""

    texts: tuple[Text, ...]

    @cached_property
    def sha256(self) -> str:
        """First 12 hex digits of a hash of all; each version of PyTorch is another text."""
        return hashlib.sha256("".join(text.sha256 for text in self.texts).encode()).hexdigest()[:12]

    def batch(self, *, size: int, sequence: int, seed: int, index: int) -> tuple[Tensor, Tensor]:
        """Draw batch `index` of the stream `seed`: tokens, int64 [size, sequence], and their topics, int64 [size].

        Every topic is as frequent, however long its text. A pure function of its arguments.
        """
        generator = torch.Generator().manual_seed(seed * 1_000_003 + index)
        topics = torch.randint(len(self.texts), (size,), generator=generator)
        spots = torch.rand(size, generator=generator, dtype=torch.float64)
        rows = []
        for topic, spot in zip(topics.tolist(), spots.tolist(), strict=True):
            data = self.texts[topic].data
            start = int(spot * (len(data) - sequence))
            rows.append(data[start : start + sequence])
        return torch.stack(rows).long(), topics


def split_topics(root: Path | None = None) -> tuple[Topics, Topics]:
    """Read the text to train on and the held-out text; a hash of a file's path decides which it is in.

    Args:
        root: the folder of the packages; this PyTorch's by default.

    Raises:
        FileNotFoundError: a topic without source on one of the sides.
    """
    root = Path(torch.__file__).parent if root is None else root
    return _read(root, held_out=False), _read(root, held_out=True)


def _read(root: Path, *, held_out: bool) -> Topics:
    texts = []
    for topic in TOPICS:
        data = bytearray()
        for path in sources(root / topic):
            if _is_held_out(path.relative_to(root).as_posix()) is held_out:
                data += path.read_bytes()
        if not data:
            raise FileNotFoundError(
                f"no Python source {'to hold out' if held_out else 'to train on'} below {topic!r} of PyTorch: "
                "install a PyTorch with its source files"
            )
        texts.append(Text(torch.frombuffer(data, dtype=torch.uint8)))
    return Topics(tuple(texts))


def _is_held_out(name: str) -> bool:
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "big") % _HELD_OUT_OF == 0
