"""Outcome of an audit under one preset: bytes that are kept, and the error of the gradient."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from compact import Saved


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """Bytes kept under one preset, and the error of the gradient.

    Attributes:
        after_bytes: by class of saved tensor; what is kept of `Audit.before_bytes`: what codecs made, and nothing of
            what is made again from others.
        cosine: of the angle between this gradient of all parameters, as one vector, and the plain one; 1.0 exactly
            where every bit is the same, NaN where it is not finite.
        relative_error: |gradient - plain| / |plain| of the same vectors; infinite where it is not finite.
        worst: the parameter with the largest relative error, "" where none has any.
        worst_error: that error.
    """

    after_bytes: Mapping[Saved, int]
    cosine: float
    relative_error: float
    worst: str
    worst_error: float
