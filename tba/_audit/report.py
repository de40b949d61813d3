"""Report of an audit: what `tba.audit` found out, as tables, as plain data, and (`picture`) as a picture."""

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
        """The same numbers in what JSON knows. Those that are not finite are None."""
        presets = {name: _plain(asdict(outcome)) for name, outcome in self.outcomes.items()}
        others = ("weight_bytes", "duplicate_bytes", "gradient_norm")
        return {
            "before_bytes": _plain(self.before_bytes),
            "presets": presets,
            "unrecognised_bytes": dict(self.unrecognised),
            **{name: getattr(self, name) for name in others},
        }

    def picture(self, path: str | os.PathLike[str]) -> None:
        """Draw it: bytes of each class before and under each preset, and the gradient's error under each.

        Args:
            path: where to; the ending chooses the format (.png, .pdf, .svg).

        Raises:
            ConfigError: matplotlib is not installed or does not know the format, or there is no such directory.
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
