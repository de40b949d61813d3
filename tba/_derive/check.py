"""Check: knows the bits of a tensor that was let go, and compares the one that is made in its place with them."""

from __future__ import annotations

from collections.abc import Iterable
from math import isqrt
from typing import Any, NamedTuple

import torch
from torch import Tensor
from xxhash import xxh3_64_intdigest

from .._device.streams import also_read, raw_bytes
from .._errors import EditedError
from .outcomes import Outcomes
from .trust import Trust


class Check(NamedTuple):
    """What is known of the bits of a tensor.

    Attributes:
        number: of its record.
        digest: of its bits, in the order of memory; see `digest`.
        trust: lost if another tensor is made in its place.
        stream: of a device, on which the digest was made; None on a CPU.
        outcomes: of comparisons on a device.
    """

    number: int
    digest: int | Tensor
    trust: Trust
    stream: Any
    outcomes: Outcomes

    def compare(self, made: Tensor, operators: Iterable[str]) -> None:
        """Compare a tensor of the same layout, made by these operators. On a device, `outcomes` tells in the end.

        Raises EditedError.
        """
        found = digest(made)
        if isinstance(found, Tensor) and isinstance(self.digest, Tensor):
            also_read(self.digest, self.stream)
            self.outcomes.add(torch.ne(found, self.digest).any(), self.trust, self._error(made, operators))
        elif found != self.digest:
            self.trust.lose()
            raise EditedError(self._error(made, operators))

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
    and each column of the memory, as a square matrix of 64-bit integers; what does not fill a row is copied. They miss
    an edit whose changes add up to zero in every row and every column, modulo 2**64. They take less than 1% of a tensor
    of 1 MiB, and 0.1% of one of 64 MiB.
    """
    begin = int(tensor.storage_offset()) * tensor.itemsize
    memory = raw_bytes(tensor, begin, tensor.nbytes)
    if tensor.is_cpu:
        return int(xxh3_64_intdigest(memory.numpy().data))
    if begin % 8:
        memory = memory.clone()
    # An odd number, so that the sum of a row tells that the signs of all have changed, which are the top bits of 64.
    columns = isqrt(tensor.nbytes // 8) | 1
    rows = tensor.nbytes // (8 * columns)
    whole = rows * columns * 8
    matrix = memory[:whole].view(torch.int64).view(rows, columns)
    # Of the sums' own type: PyTorch would first make a copy of other integers.
    return torch.cat((*(matrix.sum(dim).view(torch.uint8) for dim in (0, 1)), memory[whole:]))
