"""Outcome of an audit under one preset: bytes kept, and the error of the gradient."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from compact import Saved


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """Bytes kept under one preset, and the error of the gradient.

    Attributes:
        after_bytes: bytes kept of `Audit.before_bytes`, by class: what codecs made, and nothing of tensors that are
            recomputed from others.
        cosine: of the angle between this gradient and the plain one, of all parameters as one vector; exactly 1.0
            if they are bit-equal, NaN if not finite.
        relative_error: |gradient - plain| / |plain| of those vectors; infinite if not finite.
        worst: the parameter with the largest relative error, "" if none has any.
        worst_error: that error.
    """

    after_bytes: Mapping[Saved, int]
    cosine: float
    relative_error: float
    worst: str
    worst_error: float
