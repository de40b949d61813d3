"""Check: knows the bits of a tensor that was let go, and compares the one that is made in its place with them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor
from xxhash import xxh3_64_intdigest

from .._device.streams import raw_bytes
from .._errors import EditedError
from .outcomes import Outcomes
from .trust import Trust


class Check(NamedTuple):
    """What is known of the bits of a tensor.

    Attributes:
        number: of its record.
        digest: of its bits, in the order of memory; see `digest`.
        trust: lost if another tensor is made in its place.
        outcomes: of comparisons on a device.
    """

    number: int
    digest: int | Tensor
    trust: Trust
    outcomes: Outcomes

    def compare(self, made: Tensor, operators: Iterable[str]) -> None:
        """Compare a tensor of the same layout, made by these operators. On a device, `outcomes` tells in the end.

        Raises EditedError.
        """
        found = digest(made)
        if isinstance(found, int):
            if found != self.digest:
                self.trust.lose()
                raise EditedError(self._error(made, operators))
        else:
            self.outcomes.add(torch.ne(found, self.digest).any(), self.trust, self._error(made, operators))

    def _error(self, made: Tensor, operators: Iterable[str]) -> str:
        by = " of ".join(name.partition("Backward")[0] for name in operators)
        return (
            f"{made.dtype} {list(made.shape)} #{self.number} was let go in forward, and {by} does not give it again: "
            "it, or what it is made from, was edited where PyTorch does not see it (through `.data` or NumPy, or under "
            "no_grad before anything saved it). Take that edit out, or train with derive=False; verify='full' keeps "
            "what was edited in forward"
        )


def digest(tensor: Tensor) -> int | Tensor:
    """Digest the memory of a dense tensor, of whatever order.

    On a CPU: a hash, XXH3, which misses a change once in 2**64. On a device, where nothing waits: the sums of each row
    and each column of the memory, as a matrix of 64-bit integers; what does not fill a row is copied. They miss an edit
    whose changes add up to zero in every row and every column, modulo 2**64, and take 0.1% of the tensor's memory.
    """
    begin = int(tensor.storage_offset()) * tensor.itemsize
    if tensor.is_cpu:
        return int(xxh3_64_intdigest(raw_bytes(tensor, begin, tensor.nbytes).numpy().data))
    head = min(-begin % 8, tensor.nbytes)  # bytes ahead of the first whole integer
    rows, rest = divmod(tensor.nbytes - head, 8 * _COLUMNS)
    parts = [raw_bytes(tensor, begin, head), raw_bytes(tensor, begin + tensor.nbytes - rest, rest)]
    matrix = raw_bytes(tensor, begin + head, rows * 8 * _COLUMNS).view(torch.int64).view(rows, _COLUMNS)
    # Of the sums' own type: PyTorch would first make a copy of other integers.
    return torch.cat((*(matrix.sum(dim).view(torch.uint8) for dim in (0, 1)), *parts))


_COLUMNS = 1023  # odd, so that a row's sum tells that all signs have changed, the top bits of 64
