"""Audited: what `tba.audit` found out, as a table, as plain data, and (`_audit_picture`) as a picture."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from compact import Saved

from ._sizes import size as _size


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What one preset gave.

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


@dataclass(frozen=True, kw_only=True)
class Audit:
    """What `audit` returns. Bytes are of distinct memory: what several operators saved counts once.

    Attributes:
        before_bytes: by class of saved tensor, what plain PyTorch keeps from forward to backward. A tensor that
            operators of several classes saved counts for the strictest; but under "compact" a linear layer saves its
            projection besides, in bytes of its own.
        outcomes: by name of the preset.
        unrecognised: bytes of the class "unknown", by the node of autograd that asked for them in backward;
            "torch.utils.checkpoint" for inputs of what it runs again, "never asked for" where nobody did, "kept as
            they are" for what no codec is given (sparse tensors, subclasses).
        weight_bytes: saved, but recognised as parameters or buffers: in memory anyway, not in `before_bytes`.
        duplicate_bytes: saved again, not in `before_bytes` either.
        gradient_norm: of the plain gradient of all parameters.
    """

    before_bytes: Mapping[Saved, int]
    outcomes: Mapping[str, Outcome]
    unrecognised: Mapping[str, int]
    weight_bytes: int
    duplicate_bytes: int
    gradient_norm: float

    def __str__(self) -> str:
        """Three tables: bytes by class and preset, the gradient under each preset, and who was not recognised."""
        return "\n\n".join(
            "\n".join(_aligned(rows)) for rows in (self._bytes(), self._gradients(), self._unknown()) if rows
        )

    def to_dict(self) -> dict[str, Any]:
        """The same in what JSON knows. Numbers that are not finite are None."""
        return {
            "before_bytes": _by_value(self.before_bytes),
            "presets": {
                name: {
                    "after_bytes": _by_value(outcome.after_bytes),
                    "cosine": _finite(outcome.cosine),
                    "relative_error": _finite(outcome.relative_error),
                    "worst": outcome.worst,
                    "worst_error": _finite(outcome.worst_error),
                }
                for name, outcome in self.outcomes.items()
            },
            "unrecognised_bytes": dict(self.unrecognised),
            "weight_bytes": self.weight_bytes,
            "duplicate_bytes": self.duplicate_bytes,
            "gradient_norm": self.gradient_norm,
        }

    def picture(self, path: str | os.PathLike[str]) -> None:
        """Draw it: bytes of each class before and under each preset, and the gradient's error under each.

        Args:
            path: where to; the ending chooses the format (.png, .pdf, .svg).

        Raises:
            ConfigError: matplotlib is not installed or does not know the format, or there is no such directory.
            OSError: the file cannot be written.
        """
        from ._audit_picture import draw

        draw(self, path)

    def _bytes(self) -> list[Sequence[str]]:
        rows: list[Sequence[str]] = [("saved tensor", "plain", *self.outcomes)]
        for kind, before in self.before_bytes.items():
            after = (_size(outcome.after_bytes.get(kind, 0)) for outcome in self.outcomes.values())
            rows.append((kind.value, _size(before), *after))
        total = sum(self.before_bytes.values())
        afters = [sum(outcome.after_bytes.values()) for outcome in self.outcomes.values()]
        rows.append(("all", _size(total), *map(_size, afters)))
        rows.append(("of plain's", "100%", *(f"{after / total:.1%}" for after in afters)))
        return rows

    def _gradients(self) -> list[Sequence[str]]:
        rows: list[Sequence[str]] = [("gradient", "cosine", "relative error", "worst parameter", "its error")]
        for name, outcome in self.outcomes.items():
            worst = (outcome.worst, f"{outcome.worst_error:.2e}") if outcome.worst else ("none", "0")
            error = f"{outcome.relative_error:.2e}" if outcome.relative_error else "0"
            rows.append((name, f"{outcome.cosine:.6f}", error, *worst))
        return [*rows, (f"|plain| = {self.gradient_norm:.4g}",)]

    def _unknown(self) -> list[Sequence[str]]:
        if not self.unrecognised:
            return []
        largest_first = sorted(self.unrecognised.items(), key=lambda entry: -entry[1])
        return [("saved by, not recognised", "bytes"), *((name, _size(nbytes)) for name, nbytes in largest_first)]


def _by_value(nbytes: Mapping[Saved, int]) -> dict[str, int]:
    return {kind.value: count for kind, count in nbytes.items()}


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _aligned(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Columns two spaces apart: texts to the left, numbers to the right."""
    widths = [max(len(row[at]) for row in rows if at < len(row) > 1) for at in range(max(map(len, rows)))]
    for row in rows:
        cells = (
            cell.rjust(width) if cell[:1].isdigit() or cell in _numbered(rows, at) else cell.ljust(width)
            for at, (cell, width) in enumerate(zip(row, widths, strict=False))
        )
        yield "  ".join(cells).rstrip()


def _numbered(rows: Sequence[Sequence[str]], at: int) -> Sequence[str]:
    """The heading of a column, if numbers are below it."""
    return rows[0][at : at + 1] if at and len(rows) > 1 and rows[1][at : at + 1] and rows[1][at][:1].isdigit() else ()
