"""Presets: which codec each class of saved tensor gets. A table to print, and to override class by class.

Who saved a tensor decides what it can bear (Mesa, arXiv 2111.11124; ActNN, arXiv 2104.14129):

- a backward that is linear in the tensor (the weight gradient of a linear layer, one factor of a product) stays
  unbiased under an unbiased codec, and its input gradient stays exact: few bits, rounded stochastically
- a backward that is nonlinear in it (norms, activations) wants small errors: 8 bits, rounded to nearest
- attention computes its probabilities again from q and k and divides by a saved log-sum-exp; below 8 bits the two no
  longer agree and the gradient grows without bound. Probabilities and statistics are exact under every preset.

These floors hold for overridden tables too (`FLOORS`).
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from ._codecs.codec import Codec
from ._codecs.exact import Exact, Mask
from ._codecs.projected import Projected
from ._codecs.quantized import Quantized
from ._errors import PresetError


class Saved(enum.Enum):
    """Classes of saved tensors, by who saved them."""

    LINEAR_INPUT = "linear_input"  # the input of a linear layer or convolution, used for its weight gradient alone
    NORM_INPUT = "norm_input"  # the input of a layer or RMS norm
    NORM_STATISTICS = "norm_statistics"  # its mean and reciprocal deviation
    ACTIVATION_INPUT = "activation_input"  # what GELU, SiLU and their like save: a gate, a feed-forward's inner layer
    PRODUCT_FACTOR = "product_factor"  # a factor of an elementwise product: the up half of a gated feed-forward
    ATTENTION = "attention"  # q, k, v and the output of fused attention
    ATTENTION_STATISTICS = "attention_statistics"  # its log-sum-exp, its random state
    PROBABILITIES = "probabilities"  # the result of a softmax or log-softmax
    MASK = "mask"  # what dropout keeps: two values
    INDEX = "index"  # integers: token ids, positions
    UNKNOWN = "unknown"  # saved by an operator that is not recognised


@dataclass(frozen=True)
class Floor:
    """The least a class of tensors needs. `bits` of a code, or exactness; `why` for the error."""

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

_EXACT: Mapping[Saved, Codec] = MappingProxyType({kind: Mask() if kind is Saved.MASK else Exact() for kind in Saved})


@dataclass(frozen=True)
class Preset:
    """A codec for each class of saved tensor.

    Args:
        name: for tables and messages.
        table: classes that are left out get `Exact` (`Mask` for masks).

    Raises:
        PresetError: a codec below its class's floor.
    """

    name: str
    table: Mapping[Saved, Codec] = field(default_factory=dict)

    def __post_init__(self) -> None:
        object.__setattr__(self, "table", MappingProxyType({**_EXACT, **self.table}))
        for kind, floor in FLOORS.items():
            codec = self.table[kind]
            bits = codec.properties.bits_per_element
            if not codec.properties.exact and (floor.exact or bits is None or bits < floor.bits):
                raise PresetError(
                    f"preset {self.name!r} was given {codec.name} for {kind.value}, which needs "
                    f"{'an exact codec' if floor.exact else f'at least {floor.bits} bits'}: {floor.why}"
                )

    def __hash__(self) -> int:
        return hash((self.name, tuple(self.table.items())))

    def __getitem__(self, kind: Saved) -> Codec:
        """The codec of a class."""
        return self.table[kind]

    def override(self, changes: Mapping[Saved, Codec] | Mapping[str, Codec]) -> Preset:
        """The preset with other codecs for some classes, given by member or by its value ("norm_input").

            PRESETS["safe8"].override({"norm_input": Quantized("e4m3"), "attention": Exact()})

        Raises:
            PresetError: an unknown class, or a codec below its floor.
        """
        table = dict(self.table)
        for kind, codec in changes.items():
            try:
                table[Saved(kind)] = codec
            except ValueError:
                known = ", ".join(member.value for member in Saved)
                raise PresetError(
                    f"preset {self.name!r} has no class of saved tensor {kind!r}: choose of {known}"
                ) from None
        return Preset(f"{self.name}, changed", table)

    def __str__(self) -> str:
        """The table: class, codec, bits an element, what its error is."""
        rows = [("saved tensor", "codec", "bits", "error")]
        for kind in Saved:
            stated = self.table[kind].properties
            bits = "at most its own" if stated.bits_per_element is None else f"{stated.bits_per_element:g}"
            error = "none" if stated.exact else "unbiased" if stated.unbiased else "bounded"
            rows.append((kind.value, self.table[kind].name, bits, error))
        widths = [max(len(row[column]) for row in rows) for column in range(3)]
        lines = ["  ".join([*(c.ljust(w) for c, w in zip(row, widths, strict=False)), row[3]]) for row in rows]
        return "\n".join([f"preset {self.name}", *lines])


def _int4() -> Quantized:
    return Quantized("int4", rounding="stochastic", rotate=True)


PRESETS: Mapping[str, Preset] = MappingProxyType(
    {
        preset.name: preset
        for preset in (
            Preset("exact"),
            Preset(
                "safe8",
                {
                    Saved.LINEAR_INPUT: Quantized("int8"),
                    Saved.NORM_INPUT: Quantized("int8"),
                    Saved.ACTIVATION_INPUT: Quantized("int8"),
                    Saved.PRODUCT_FACTOR: Quantized("int8"),
                    Saved.ATTENTION: Quantized("int8"),
                },
            ),
            Preset(
                "balanced",
                {
                    Saved.LINEAR_INPUT: _int4(),
                    Saved.NORM_INPUT: Quantized("int8"),
                    Saved.ACTIVATION_INPUT: Quantized("int8"),
                    Saved.PRODUCT_FACTOR: _int4(),
                    Saved.ATTENTION: Quantized("int8"),
                },
            ),
            Preset(
                "max",
                {
                    Saved.LINEAR_INPUT: Quantized("int2", rounding="stochastic", rotate=True),
                    Saved.NORM_INPUT: Quantized("int4", rotate=True),
                    Saved.ACTIVATION_INPUT: Quantized("int4", rotate=True),
                    Saved.PRODUCT_FACTOR: _int4(),
                    Saved.ATTENTION: Quantized("int8"),
                },
            ),
            # The paper's: inputs of linear layers alone, by Gaussian projections.
            Preset("compact", {Saved.LINEAR_INPUT: Projected()}),
        )
    }
)


def preset(name: str, *, rank: int | float | None = None) -> Preset:
    """A preset by name.

    Args:
        name: a key of `PRESETS`.
        rank: of the projection, for "compact" alone: a number or a share of the width (0.25 without it).

    Raises:
        PresetError: an unknown name, or a rank for a preset that projects nothing.
        CodecError: a rank that is neither.
    """
    if name not in PRESETS:
        raise PresetError(f"there is no preset {name!r}: choose of {', '.join(PRESETS)}")
    if rank is None:
        return PRESETS[name]
    if name != "compact":
        raise PresetError(f'preset {name!r} was given rank {rank!r}, but it projects nothing: use "compact"')
    return Preset(name, {Saved.LINEAR_INPUT: Projected(rank)})
