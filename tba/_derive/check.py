"""Check: knows the bits of a tensor that was let go, and compares the one that is made in its place with them."""

from __future__ import annotations

from collections.abc import Hashable
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
        name: of the tensor, for the message.
        operators: that make it again, for the message.
        digest: of its bits, in the order of memory: XXH3, which misses a change once in 2**64.
        trust: lost if another tensor is made in its place.
    """

    name: str
    operators: str
    digest: int
    trust: Trust

    def compare(self, made: Tensor) -> None:
        """Compare a tensor of the same layout. Raises EditedError."""
        if digest(made) == self.digest:
            return
        self.trust.lose()
        raise EditedError(
            f"{self.name} was let go in forward to be made again by {self.operators}, which now gives other bits: what "
            "it is made from, or the tensor itself, was edited in a way that PyTorch does not see (`.data`, NumPy, or "
            "under no_grad a tensor that no operator saved). Take that edit out, or train with derive=False; with "
            "verify='full' what was edited before it is let go is found in forward, and kept"
        )


def digest(tensor: Tensor) -> int:
    """Hash the memory of a dense tensor, of whatever order."""
    begin = tensor.storage_offset() * tensor.itemsize
    return int(xxh3_64_intdigest(raw_bytes(tensor, begin, tensor.nbytes).numpy()))
