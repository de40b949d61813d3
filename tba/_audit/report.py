"""Report of an audit: the findings as tables, as plain data, and as a picture."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from compact import Saved

from .._text import as_text, size
from .outcome import Outcome
from .picture import draw


@dataclass(frozen=True, kw_only=True)
class Audit:
    """Findings of `audit`. Bytes are of distinct memory: a tensor that several operators saved counts once.

    Attributes:
        before_bytes: bytes that plain PyTorch keeps from forward to backward, by class of saved tensor. A tensor that
            operators of several classes saved counts for the strictest; but under "compact" a linear layer also saves
            its projection, in separate bytes.
        outcomes: the outcome of each preset, by its name.
        unrecognised: bytes of the class "unknown", by the autograd node that unpacked them in backward;
            "torch.utils.checkpoint" for the inputs of a recomputation, "never asked for" if no node did, "kept as they
            are" for tensors that no codec takes (sparse tensors, subclasses).
        weight_bytes: bytes saved of parameters and buffers: in memory anyway, not in `before_bytes`.
        duplicate_bytes: bytes saved again, not in `before_bytes` either.
        gradient_norm: norm of the plain gradient of all parameters.
    """

    before_bytes: Mapping[Saved, int]
    outcomes: Mapping[str, Outcome]
    unrecognised: Mapping[str, int]
    weight_bytes: int
    duplicate_bytes: int
    gradient_norm: float

    def __str__(self) -> str:
        """Format three tables: bytes by class, the gradient under each preset, and unrecognised savers."""
        tables = [
            as_text(list(self._bytes())),
            as_text(list(self._gradients()), [f"|plain| = {self.gradient_norm:.4g}"]),
        ]
        if self.unrecognised:
            largest_first = sorted(self.unrecognised.items(), key=lambda entry: -entry[1])
            savers = [(name, size(nbytes)) for name, nbytes in largest_first]
            tables.append(as_text([("saved by, not recognised", "bytes"), *savers]))
        return "\n\n".join(tables)

    def to_dict(self) -> dict[str, Any]:
        """Convert to JSON types. Numbers that are not finite become None."""
        names = {"outcomes": "presets", "unrecognised": "unrecognised_bytes"}
        return {names.get(name, name): _plain(value) for name, value in asdict(self).items()}

    def picture(self, path: str | os.PathLike[str]) -> None:
        """Draw the bytes of each class, plain and under each preset, and the gradient's error under each.

        Args:
            path: the file; its ending chooses the format (.png, .pdf, .svg).

        Raises:
            ConfigError: matplotlib is not installed or does not know the format, or the directory does not exist.
            OSError: the file cannot be written.
        """
        draw(self.before_bytes, self.outcomes, path)

    def _bytes(self) -> Iterator[Sequence[str]]:
        afters = [outcome.after_bytes for outcome in self.outcomes.values()]
        yield "saved tensor", "plain", *self.outcomes
        for kind, before in self.before_bytes.items():
            yield kind.value, size(before), *(size(after.get(kind, 0)) for after in afters)
        total, totals = sum(self.before_bytes.values()), [sum(after.values()) for after in afters]
        yield "all", size(total), *map(size, totals)
        yield "of plain's", "100%", *(f"{nbytes / total:.1%}" for nbytes in totals)

    def _gradients(self) -> Iterator[Sequence[str]]:
        yield "gradient", "cosine", "relative error", "worst parameter", "its error"
        for name, outcome in self.outcomes.items():
            worst = (outcome.worst, f"{outcome.worst_error:.2e}") if outcome.worst else ("none", "0")
            error = f"{outcome.relative_error:.2e}" if outcome.relative_error else "0"
            yield name, f"{outcome.cosine:.6f}", error, *worst


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key.value if isinstance(key, Saved) else key: _plain(entry) for key, entry in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value
