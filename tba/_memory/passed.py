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
    """Sum of the bytes of objects, as long as they live. The engine's lock guards it."""

    def __init__(self) -> None:
        self._nbytes = 0
        self._alive: dict[int, _Reference] = {}  # by id; a weak reference that dies first tells nothing
        self._gone: deque[weakref.ref[Any]] = deque()

    def add(self, held: object, nbytes: int) -> None:
        """Add the bytes of an object that a graph holds."""
        reference = _Reference(held, self._gone.append)
        reference.nbytes = nbytes
        self._alive[id(reference)] = reference
        self._nbytes += nbytes

    @property
    def nbytes(self) -> int:
        """The sum."""
        while self._gone:
            reference = self._alive.pop(id(self._gone.popleft()))
            self._nbytes -= reference.nbytes
        return self._nbytes
