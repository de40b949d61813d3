"""Adaptive: codes of 8, 4 or 2 bits, the widths chosen by how much each tensor matters, after GACT (arXiv 2206.11357).

Our reading of the paper, not its code. Every saved activation is rounded stochastically to b bits in groups of 256; its
share of the gradient's variance is then c S(b), with S(b) the square of a code's step. The sensitivity c is measured
while training, every `refresh` steps: a step's gradient is computed twice with all noise but one tensor's the same;
half of the squared difference is that tensor's variance. Then all widths begin at 8, and again and again the tensor is
narrowed for which a bit of memory less adds the least variance, until the average over all elements is met.

Two things are not the paper's. The codes are this project's (`compact.Quantized`: one scale, no zero point). And what
fused attention keeps has 8 bits and is outside of the average: its backward makes the probabilities again, which no
longer agree with the saved log-sum-exp when q and k have fewer; in the paper attention was not fused.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor, nn

import compact

from .places import ATTENTION, Place, PlacedHooks

GROUP = 256
# Bits of a code -> the largest magnitude that it counts to.
TOPS = {8: 127.0, 4: 7.0, 2: 1.5}
_CODECS = {
    8: compact.Quantized("int8", group=GROUP, rounding="stochastic"),
    4: compact.Quantized("int4", group=GROUP, rounding="stochastic"),
    2: compact.Quantized("int2", group=GROUP, rounding="stochastic"),
}
Key = TypeVar("Key")


def assign_bits(sizes: Mapping[Key, int], sensitivities: Mapping[Key, float], average: float) -> dict[Key, int]:
    """Choose the bits of each tensor: on average over all elements at most `average`, with little variance added.

    Args:
        sizes: elements of each tensor.
        sensitivities: c of each.
        average: bits of an element.

    Raises:
        ValueError: an average below the narrowest code.
    """
    widths = list(TOPS)
    if average < widths[-1]:
        raise ValueError(f"an average of {average:g} bits was asked for; the narrowest code has {widths[-1]}")
    bits = dict.fromkeys(sizes, widths[0])
    spare = average * sum(sizes.values()) - sum(bits[key] * size for key, size in sizes.items())
    order = list(sizes)

    def step(number: int) -> tuple[float, int] | None:
        wide = bits[order[number]]
        if wide == widths[-1]:
            return None
        narrow = widths[widths.index(wide) + 1]
        more = sensitivities[order[number]] * (TOPS[narrow] ** -2 - TOPS[wide] ** -2)
        return more / ((wide - narrow) * sizes[order[number]]), number

    heap = [found for number in range(len(order)) if (found := step(number)) is not None]
    heapq.heapify(heap)
    while spare < 0:
        _, number = heapq.heappop(heap)
        key = order[number]
        wide = bits[key]
        bits[key] = widths[widths.index(wide) + 1]
        spare += (wide - bits[key]) * sizes[key]
        if (found := step(number)) is not None:
            heapq.heappush(heap, found)
    return bits


@dataclass(frozen=True)
class _Code:
    codec: compact.Quantized
    packed: compact.Packed

    @property
    def nbytes(self) -> int:
        return self.packed.nbytes

    def restore(self) -> Tensor:
        return self.codec.decode(self.packed)


class AdaptiveHooks(PlacedHooks):
    """GACT-like hooks.

    Args:
        model: to train.
        bits: average over all elements of saved activations, scales and attention apart.
        refresh: steps until the widths are chosen anew.
        seed: of the rounding noise.

    Attributes:
        widths: bits by place, attention apart, once a step has been taken.
        sizes: elements by place.
    """

    def __init__(self, model: nn.Module, *, bits: float, refresh: int, seed: int) -> None:
        super().__init__(model)
        self.period = refresh
        self.widths: dict[Place, int] = {}
        self.sizes: dict[Place, int] = {}
        self._average, self._seed = bits, seed
        self._parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self._redrawn: Place | None = None
        self._learning = False
        for codec in _CODECS.values():  # compiles what it needs now, and not in a later step
            codec.decode(codec.encode(torch.ones(2 * GROUP)))

    def learn(self, run: Callable[[], None]) -> None:
        self._learning = True
        try:
            base = self._gradient(run)
            sensitivities = {}
            sizes = {place: size for place, size in self.sizes.items() if place.function != ATTENTION}
            for place in sizes:
                self._redrawn = place
                other = self._gradient(run)
                squares = sum(float((a - b).square().sum()) for a, b in zip(base, other, strict=True))
                sensitivities[place] = squares / 2 * TOPS[self._width(place)] ** 2
            self.widths = assign_bits(sizes, sensitivities, self._average)
        finally:
            self._learning, self._redrawn = False, None

    def encode(self, place: Place, tensor: Tensor) -> _Code:
        self.sizes[place] = tensor.numel()
        codec = _CODECS[self._width(place)]
        # Noise of a step of its own; while learning the same in each forward, but for the tensor in question.
        draw = f"learn{place == self._redrawn}" if self._learning else self.forwards
        return _Code(codec, codec.encode(tensor, compact.key(self._seed, str(place), draw)))

    def _width(self, place: Place) -> int:
        """Bits of a place: those chosen, at first the narrowest width that has the average."""
        if place.function == ATTENTION:
            return max(TOPS)
        return self.widths.get(place) or min(width for width in TOPS if width >= min(self._average, max(TOPS)))

    def _gradient(self, run: Callable[[], None]) -> list[Tensor]:
        for parameter in self._parameters:
            parameter.grad = None
        with self.packing():
            run()
        found = [parameter.grad for parameter in self._parameters if parameter.grad is not None]
        for parameter in self._parameters:
            parameter.grad = None
        return found
