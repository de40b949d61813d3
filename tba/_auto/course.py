"""Course: what a planned step saves, tensor by tensor, and which of it the full hooks have to see.

A plan that stands decides alike in each step. So the first step by a plan is written down as it is packed, and those
that follow it are compared with that: a tensor of as many bytes as the one in its place, which shares memory with those
before it in the same way, does what that one did. What stayed is let pass; what moves goes through the full hooks.

What is smaller than a storage has to be to move, and no slice of one that is large enough, comes and goes unnoticed.

Assumption: where sizes and shared memory are those of the step that was written down, in its order, what was a weight,
a duplicate or not worth moving there is so again. Where they are not, the step has departed from its plan.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from .._record.plain import Shell
from .._record.record import Record
from .._record.sighting import Sizes

_MOST_ENTRIES = 1 << 16  # beyond which forwards that have no backward are not written down


class Entry(NamedTuple):
    """One saved tensor of a step.

    Attributes:
        nbytes: of the tensor.
        moves: its record does.
        kept_bytes: of its record, if that stays and is made for it; else 0.
        first: number of the entry whose record it shares; its own if there is none before.
        offset: its address less that entry's.
        follows: others give its record again.
    """

    nbytes: int
    moves: bool
    kept_bytes: int
    first: int
    offset: int
    follows: bool = False


class Notes:
    """A step that is written down.

    Attributes:
        entries: what it has saved so far; None once it has saved what a course cannot tell apart.
    """

    def __init__(self, sizes: Sizes) -> None:
        self.entries: list[Entry] | None = []
        self._sizes = sizes
        self._addresses: list[int] = []
        self._by_record: dict[int, int] = {}

    def note(self, found: tuple[int, int] | None, record: Any) -> None:
        """Note the first part of what the full hooks have made of a tensor, of whose memory `found` tells."""
        if self.entries is None:
            return
        if type(record) is Shell or len(self.entries) >= _MOST_ENTRIES:
            self.entries = None
        elif found is not None:
            self._add(*found, record)
        elif type(record) is Record:
            self.entries = None  # smaller than what counts, and yet worth a record: a view that spans more

    def _add(self, nbytes: int, address: int, record: Any) -> None:
        assert self.entries is not None
        number = len(self.entries)
        if type(record) is not Record:
            if nbytes >= self._sizes.storage_bytes:
                self._addresses.append(address)
                self.entries.append(Entry(nbytes, False, 0, number, 0))
            return
        self._addresses.append(address)
        first = self._by_record.setdefault(record.number, number)
        stays = not (record.goes or record.follows)
        kept_bytes = record.nbytes if first == number and stays else 0
        offset = address - self._addresses[first]
        self.entries.append(Entry(nbytes, record.goes, kept_bytes, first, offset, record.follows))


class Course:
    """A step that follows entries."""

    def __init__(self, entries: list[Entry], min_tensor_bytes: int) -> None:
        self._entries = entries
        self._min_tensor_bytes = min_tensor_bytes
        self._addresses: list[int] = []

    def next(self, nbytes: int, address: int) -> Entry | None:
        """Return the entry of the next tensor; None if there is none for such a tensor."""
        number, addresses = len(self._addresses), self._addresses
        if number < len(self._entries):
            entry = self._entries[number]
            if entry.nbytes == nbytes:
                addresses.append(address)
                if address - addresses[entry.first] == entry.offset:
                    return entry
                addresses.pop()
        return SMALL if nbytes < self._min_tensor_bytes else None


SMALL = Entry(0, False, 0, 0, 0)  # of a tensor that was not written down
