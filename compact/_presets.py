"""Presets: tables that map each class of saved tensors to a codec; printable, and overridable class by class.

The operator that saved a tensor decides which errors are acceptable (Mesa, arXiv 2111.11124; ActNN, arXiv 2104.14129):

- If backward is linear in the tensor (the weight gradient of a linear layer, a factor of a product), an unbiased codec
  keeps the gradient unbiased, and the input gradient stays exact: few bits, stochastic rounding.
- If backward is nonlinear in it (norms, activations), errors must be small: 8 bits, rounded to nearest.
- Attention recomputes its probabilities from q and k and divides by a saved log-sum-exp. Below 8 bits the two disagree
  and the gradient grows without bound. Probabilities and statistics are exact in every preset.

These floors also hold for overridden tables (`FLOORS`).
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from ._codecs.codec import Codec
from ._codecs.exact import Exact, Mask
from ._codecs.projected import Projected
from ._codecs.quantized import Quantized
from ._errors import PresetError


class Saved(enum.Enum):
    """Classes of saved tensors, by the operator that saved them."""

    LINEAR_INPUT = "linear_input"  # the input of a linear layer or convolution, used only for its weight gradient
    NORM_INPUT = "norm_input"  # the input of a layer or RMS norm
    NORM_STATISTICS = "norm_statistics"  # its mean and reciprocal deviation
    ACTIVATION_INPUT = "activation_input"  # the input of GELU, SiLU and the like: a gate, a feed-forward's inner layer
    PRODUCT_FACTOR = "product_factor"  # a factor of an elementwise product: the up half of a gated feed-forward
    ATTENTION = "attention"  # q, k, v and the output of fused attention
    ATTENTION_STATISTICS = "attention_statistics"  # its log-sum-exp, its random state
    PROBABILITIES = "probabilities"  # the result of a softmax or log-softmax
    MASK = "mask"  # dropout's: two values
    INDEX = "index"  # integers: token ids, positions
    UNKNOWN = "unknown"  # saved by an operator that is not recognized


@dataclass(frozen=True)
class Floor:
    """The least precision of a class: `bits` of a code, or exactness. The error message includes `why`."""

    bits: int
    exact: bool
    why: str


FLOORS: Mapping[Saved, Floor] = MappingProxyType(
    {
        Saved.ATTENTION: Floor(8, False, "probabilities made again from fewer bits disagree with the log-sum-exp"),
        Saved.ATTENTION_STATISTICS: Floor(0, True, "every probability is divided by it"),
        Saved.NORM_STATISTICS: Floor(0, True, "every element of the norm is scaled by it, and it is small"),
        Saved.PROBABILITIES: Floor(0, True, "errors in small probabilities are large in the gradient"),
        Saved.INDEX: Floor(0, True, "an index is right or wrong"),
    }
)

_EXACT: Mapping[Saved, Codec] = MappingProxyType({saved: Mask() if saved is Saved.MASK else Exact() for saved in Saved})


@dataclass(frozen=True)
class Preset:
    """A codec for each class of saved tensors.

    Args:
        name: for tables and messages.
        table: classes left out get `Exact` (`Mask` for masks).

    Raises:
        PresetError: a codec below its class's floor.
    """

    name: str
    table: Mapping[Saved, Codec] = field(default_factory=dict)

    def __post_init__(self) -> None:
        object.__setattr__(self, "table", MappingProxyType({**_EXACT, **self.table}))
        for saved, floor in FLOORS.items():
            codec = self.table[saved]
            bits = codec.properties.bits_per_element
            if not codec.properties.exact and (floor.exact or bits is None or bits < floor.bits):
                raise PresetError(
                    f"preset {self.name!r} was given {codec.name} for {saved.value}, which needs "
                    f"{'an exact codec' if floor.exact else f'at least {floor.bits} bits'}: {floor.why}"
                )

    def __reduce__(self) -> tuple[Any, ...]:
        return Preset, (self.name, dict(self.table))  # a MappingProxyType can be neither copied nor pickled

    def __hash__(self) -> int:
        return hash((self.name, tuple(self.table.items())))

    def __getitem__(self, saved: Saved) -> Codec:
        """The codec of a class."""
        return self.table[saved]

    def override(self, changes: Mapping[Saved, Codec] | Mapping[str, Codec]) -> Preset:
        """Return a preset with other codecs for some classes, named by member or by value ("norm_input").

            PRESETS["safe8"].override({"norm_input": Quantized("e4m3"), "attention": Exact()})

        Raises:
            PresetError: an unknown class, or a codec below its floor.
        """
        table = dict(self.table)
        for saved, codec in changes.items():
            try:
                table[Saved(saved)] = codec
            except ValueError:
                known = ", ".join(member.value for member in Saved)
                raise PresetError(
                    f"preset {self.name!r} has no class of saved tensor {saved!r}: choose one of {known}"
                ) from None
        return Preset(f"{self.name}, changed", table)

    def __str__(self) -> str:
        """Format the table: class, codec, bits per element, kind of error."""
        rows = [("saved tensor", "codec", "bits", "error")]
        for saved in Saved:
            stated = self.table[saved].properties
            bits = "at most its own" if stated.bits_per_element is None else f"{stated.bits_per_element:g}"
            error = "none" if stated.exact else "unbiased" if stated.unbiased else "bounded"
            rows.append((saved.value, self.table[saved].name, bits, error))
        widths = [max(len(row[column]) for row in rows) for column in range(3)]
        lines = ["  ".join([*(c.ljust(w) for c, w in zip(row, widths, strict=False)), row[3]]) for row in rows]
        return "\n".join([f"preset {self.name}", *lines])


_LOSSY = (Saved.LINEAR_INPUT, Saved.NORM_INPUT, Saved.ACTIVATION_INPUT, Saved.PRODUCT_FACTOR, Saved.ATTENTION)
_INT8: Mapping[Saved, Codec] = dict.fromkeys(_LOSSY, Quantized("int8"))
_INT4 = Quantized("int4", rounding="stochastic", rotate=True)

PRESETS: Mapping[str, Preset] = MappingProxyType(
    {
        preset.name: preset
        for preset in (
            Preset("exact"),
            Preset("safe8", _INT8),
            Preset("balanced", {**_INT8, Saved.LINEAR_INPUT: _INT4, Saved.PRODUCT_FACTOR: _INT4}),
            Preset(
                "max",
                {
                    **_INT8,
                    Saved.LINEAR_INPUT: Quantized("int2", rounding="stochastic", rotate=True),
                    Saved.NORM_INPUT: Quantized("int4", rotate=True),
                    Saved.ACTIVATION_INPUT: Quantized("int4", rotate=True),
                    Saved.PRODUCT_FACTOR: _INT4,
                },
            ),
            # The paper's: Gaussian projections of the inputs of linear layers, and nothing else.
            Preset("compact", {Saved.LINEAR_INPUT: Projected()}),
        )
    }
)


def preset(name: str, *, rank: int | float | None = None) -> Preset:
    """Look up a preset by name.

    Args:
        name: a key of `PRESETS`.
        rank: rank of the projection, only for "compact": a number of columns or a share of the width (default 0.25).

    Raises:
        PresetError: an unknown name, or a rank for a preset without projection.
        CodecError: a rank that is neither a number of columns nor a share.
    """
    if name not in PRESETS:
        raise PresetError(f"there is no preset {name!r}: choose one of {', '.join(PRESETS)}")
    if rank is None:
        return PRESETS[name]
    if name != "compact":
        raise PresetError(f'preset {name!r} was given rank {rank!r}, but it projects nothing: use "compact"')
    return Preset(name, {Saved.LINEAR_INPUT: Projected(rank)})
