"""Ranked: what codecs for inputs of linear layers share: a rank, and errors that no draw bounds."""

from __future__ import annotations

import math
from dataclasses import dataclass

from .._errors import CodecError, UnsupportedTensor
from .._projection.projection import check_rank
from .codec import FLOATS, Codec, Properties
from .strided import Spec


@dataclass(frozen=True)
class Ranked(Codec):
    """Base of `Projected` and `Sampled`."""

    rank: int | float = 0.25

    def __post_init__(self) -> None:
        if isinstance(self.rank, bool) or not (0 < self.rank < 1 or (isinstance(self.rank, int) and self.rank >= 1)):
            raise CodecError(
                f"{type(self).__name__} was given rank {self.rank!r}: give a whole number of at least 1, or a share of "
                "the width above 0 and below 1"
            )

    @property
    def properties(self) -> Properties:
        """Unbiased, but no draw has a bounded error."""
        return Properties(
            exact=False,
            unbiased=True,
            keyed=True,
            bits_per_element=None,
            error_of_largest=None,
            relative_error=math.inf,
        )

    def rank_of(self, width: int, what: str) -> int:
        """The rank for a width. Raises RankError for a rank above it, naming its owner, `what`."""
        if isinstance(self.rank, float):
            return max(1, int(width * self.rank))
        check_rank(self.rank, width, what)
        return self.rank

    def _name(self, kind: str) -> str:
        return f"{kind} {self.rank}" if isinstance(self.rank, int) else f"{kind} n*{self.rank:g}"

    def _check(self, spec: Spec) -> None:
        if spec.dtype not in FLOATS or not spec.shape:
            raise UnsupportedTensor(
                f"{self.name} was given a {spec.dtype} tensor of shape {list(spec.shape)}: it takes bfloat16, float16, "
                "float32 and float64 of at least one dimension; use Exact"
            )
