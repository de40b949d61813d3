"""Passed: bytes that graphs hold without a record, or would hold, until they let go of them."""

from __future__ import annotations

import weakref
from collections import deque
from typing import Any


class _Reference(weakref.ref[Any]):
    """A weak reference to what was passed, which outlives it. As for `Remains`, its callback runs no Python code."""

    __slots__ = ("nbytes",)
    nbytes: int


class Passed:
    """Sum of the bytes of objects, as long as they live. The engine's lock guards it.

    Attributes:
        nbytes: the sum; `settle` first, if anything is `gone`.
        gone: weak references to what has died since.
    """

    __slots__ = ("_alive", "gone", "nbytes")

    def __init__(self) -> None:
        self.nbytes = 0
        self.gone: deque[weakref.ref[Any]] = deque()
        self._alive: dict[int, _Reference] = {}  # by id; a weak reference that dies first tells nothing

    def add(self, held: object, nbytes: int) -> None:
        """Add the bytes of an object that a graph holds."""
        reference = _Reference(held, self.gone.append)
        reference.nbytes = nbytes
        self._alive[id(reference)] = reference
        self.nbytes += nbytes

    def settle(self) -> None:
        """Take off what has died."""
        gone, alive = self.gone, self._alive
        while gone:
            self.nbytes -= alive.pop(id(gone.popleft())).nbytes
