"""Place: on which of two levels the bytes of a write are, and which write leaves the upper one next.

COMING -> HOST -> SPILLING -> FILE      SPILLING -> HOST where the file store failed,
   `-----------------------> FILE       at once where a write alone is larger than the budget, or its memory is not
                                        `given`; GONE from any
"""

from __future__ import annotations

import enum
from collections.abc import Iterable

from ._ticket import Ticket


class Place(enum.Enum):
    """Where the bytes of a write are."""

    COMING = enum.auto()  # from submission until they are stored: in the submitter's memory
    HOST = enum.auto()  # in host memory
    SPILLING = enum.auto()  # in host memory, and on their way to the file
    FILE = enum.auto()  # in the file alone
    GONE = enum.auto()  # discarded, or never stored because something failed


class Stored:
    """The location of a write. `skew` is as in `Location`, of bytes in the file; those in memory are copied anyhow."""

    __slots__ = ("discarded", "file", "host", "nbytes", "place", "skew")

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self.skew = 0
        self.place = Place.COMING
        self.discarded = False
        self.host: Ticket | None = None  # of the host store, in HOST and SPILLING
        self.file: Ticket | None = None  # of the file store, in SPILLING and FILE


def coldest(stored: Iterable[Stored]) -> Stored | None:
    """What makes way next, given writes in the order of their submission; None when nothing can."""
    return next((one for one in stored if one.place is Place.HOST), None)
