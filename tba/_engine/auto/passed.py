"""Passed: bytes that graphs hold without a record, until they let go of them."""

from __future__ import annotations

import weakref
from collections import deque

from torch import Tensor


class _Reference(weakref.ref[Tensor]):
    """A weak reference to what was passed, which outlives it. As for `Remains`, its callback runs no Python code."""

    __slots__ = ("nbytes",)
    nbytes: int


class Passed:
    """Sum of what has been let pass and still lives. The engine's lock guards it."""

    def __init__(self) -> None:
        self._ours, self._shared = _Living(), _Living()

    def add(self, alias: Tensor, nbytes: int) -> None:
        """Add bytes that live as long as a tensor object of the graph's own does."""
        self._ours.add(alias, nbytes)

    def add_leaf(self, leaf: Tensor, nbytes: int) -> None:
        """Add bytes of a tensor object that the program may have too, beyond the step, in which they then count."""
        self._shared.add(leaf, nbytes)

    @property
    def nbytes(self) -> int:
        """The sum."""
        return self._ours.nbytes + self._shared.nbytes

    @property
    def living_bytes(self) -> int:
        """What a graph of the engine's holds, without what the program may have too."""
        return self._ours.nbytes

    def end_step(self) -> None:
        """End a step. Graphs that live on count on."""
        self._shared = _Living()


class _Living:
    """Sum of the bytes of tensor objects, as long as they live."""

    def __init__(self) -> None:
        self._nbytes = 0
        self._alive: dict[int, _Reference] = {}  # by id; a weak reference that dies first tells nothing
        self._gone: deque[weakref.ref[Tensor]] = deque()

    def add(self, tensor: Tensor, nbytes: int) -> None:
        reference = _Reference(tensor, self._gone.append)
        reference.nbytes = nbytes
        self._alive[id(reference)] = reference
        self._nbytes += nbytes

    @property
    def nbytes(self) -> int:
        while self._gone:
            reference = self._alive.pop(id(self._gone.popleft()))
            self._nbytes -= reference.nbytes
        return self._nbytes
