"""Digits: classification of the handwritten digits that scikit-learn ships, read as sequences of their pixels.

The images are of many people's hands (UCI's "optical recognition of handwritten digits": 1,797 of 8 x 8 pixels, values
0 to 16). Nothing is downloaded, and every version of the package has the same.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cache, cached_property

import torch
from torch import Tensor

CLASSES, PIXELS = 10, 64
# One in so many images is held out.
_HELD_OUT_OF = 5


@dataclass(frozen=True, eq=False)
class Digits:
    """Images, as tokens int64 [N, 64], and what they show, int64 [N]."""

    images: Tensor
    labels: Tensor

    @cached_property
    def sha256(self) -> str:
        """First 12 hex digits of a hash of all."""
        raw = self.images.numpy().tobytes() + self.labels.numpy().tobytes()
        return hashlib.sha256(raw).hexdigest()[:12]

    def batch(self, *, size: int, sequence: int, seed: int, index: int) -> tuple[Tensor, Tensor]:
        """Draw batch `index` of the stream `seed`: tokens, int64 [size, sequence], and their classes, int64 [size].

        Each image comes once in an epoch, in an order of its own. A pure function of its arguments.

        Raises:
            ValueError: the sequence is not an image's.
        """
        if sequence != PIXELS:
            raise ValueError(f"an image is a sequence of {PIXELS} pixels, not of {sequence}")
        chosen = torch.tensor([self._at(seed, place) for place in range(index * size, (index + 1) * size)])
        return self.images[chosen], self.labels[chosen]

    def _at(self, seed: int, place: int) -> int:
        epoch, number = divmod(place, len(self.labels))
        return _order(len(self.labels), seed * 1_000_003 + epoch)[number]


def split_digits() -> tuple[Digits, Digits]:
    """Read the images to train on, and every fifth, which is held out.

    Raises:
        ImportError: scikit-learn is not installed.
    """
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise ImportError("the digits are scikit-learn's: pip install scikit-learn") from error
    pixels, labels = load_digits(return_X_y=True)
    images, shown = torch.from_numpy(pixels).long(), torch.from_numpy(labels).long()
    held_out = torch.arange(len(shown)) % _HELD_OUT_OF == 0
    return Digits(images[~held_out], shown[~held_out]), Digits(images[held_out], shown[held_out])


@cache
def _order(count: int, seed: int) -> list[int]:
    order: list[int] = torch.randperm(count, generator=torch.Generator().manual_seed(seed)).tolist()
    return order
