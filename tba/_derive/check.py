"""Check: knows the bits of a tensor that was let go, and compares the one that is made in its place with them."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from typing import NamedTuple

from torch import Tensor
from xxhash import xxh3_64_intdigest

from .._device.streams import raw_bytes
from .._errors import EditedError
from .operators import Scalars

_ENOUGH = 2  # comparisons in full


class Trust:
    """What is known of the recipes of one signature at one place of the step.

    Attributes:
        signature: theirs.
        lost: one of them has given another tensor.
        scalars: that the last right one has found, as autograd does not save them.
        run_s: seconds that it took.
    """

    def __init__(self, signature: Hashable) -> None:
        self.signature = signature
        self.lost = False
        self.scalars: tuple[Scalars, ...] = ()
        self.run_s = 0.0
        self._times = 0

    @property
    def enough(self) -> bool:
        """Whether so many were right that the next counts as right until it is used."""
        return self._times >= _ENOUGH

    def gain(self, scalars: tuple[Scalars, ...], run_s: float) -> None:
        """Note a recipe that has given the right tensor."""
        self.scalars, self.run_s = scalars, run_s
        self._times += 1

    def lose(self) -> None:
        """Note that a recipe has given another tensor."""
        self.lost = True


class Check(NamedTuple):
    """What is known of the bits of a tensor on a CPU.

    Attributes:
        number: of its record.
        digest: of its bits, in the order of memory: XXH3, which misses a change once in 2**64.
        trust: lost if another tensor is made in its place.
    """

    number: int
    digest: int
    trust: Trust

    def compare(self, made: Tensor, operators: Iterable[str]) -> None:
        """Compare a tensor of the same layout, made by these operators. Raises EditedError."""
        if digest(made) == self.digest:
            return
        self.trust.lose()
        by = " of ".join(name.partition("Backward")[0] for name in operators)
        raise EditedError(
            f"{made.dtype} {list(made.shape)} #{self.number} was let go in forward, and {by} does not give it again: "
            "it, or what it is made from, was edited where PyTorch does not see it (through `.data` or NumPy, or under "
            "no_grad before anything saved it). Take that edit out, or train with derive=False; verify='full' keeps "
            "what was edited in forward"
        )


def digest(tensor: Tensor) -> int:
    """Hash the memory of a dense tensor, of whatever order."""
    begin = int(tensor.storage_offset()) * tensor.itemsize
    return int(xxh3_64_intdigest(raw_bytes(tensor, begin, tensor.nbytes).numpy().data))
