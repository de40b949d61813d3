"""Communication: tells whether a forward exchanges data with other ranks.

A block with a collective inside that runs again on one rank alone would meet, in backward, whatever its peers exchange
next: where the shapes are equal, gradients are wrong and nothing raises. So a block that communicates is tried and
recomputed only together with all ranks that it exchanges data with (`_group`). So is one whose parts have hooks that
gather weights (`_state.gathered`), whether they do so in one run or not: in another they may.

Process groups count the operations that they have begun: those of Gloo all, those of NCCL but for sends and receives,
which are seen where Python calls them. Unseen stays what goes around `torch.distributed`'s groups (symmetric memory,
a library's own communicators) and what other code sends by NCCL from C++. What another thread exchanges meanwhile is
taken for the block's.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import TracebackType
from typing import Any

from .._torch.private import process_groups, ranks_of

_POINT_TO_POINT = ("send", "recv", "recv_anysource")


class Communication:
    """A region, and what it exchanges with other ranks.

    Attributes:
        counts: operations that each group of several ranks has begun in it, on each kind of device; 0 of a backend that
            does not count.
        ranks: those in the groups that have begun any.
        sent: whether Python has called for a send or a receive.
        untold: a backend does not count.
    """

    def __init__(self) -> None:
        self.counts: list[int] = []
        self.ranks: frozenset[int] = frozenset()
        self.sent = self.untold = False

    def __enter__(self) -> Communication:
        self._before = _begun()
        if self._before:
            _watched.add(self)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._before:
            _watched.remove(self)
        after = _begun()
        self.untold = any(new is None for _, new in after)
        self.counts = [(new or 0) - (old or 0) for (_, old), (_, new) in zip(self._before, after, strict=False)]
        met = {id(group): group for (group, _), count in zip(after, self.counts, strict=False) if count}
        self.ranks = frozenset(rank for group in met.values() for rank in ranks_of(group))

    @property
    def possible(self) -> bool:
        """Whether it may have communicated."""
        return self.sent or self.untold or any(self.counts)

    def is_among(self, ranks: frozenset[int]) -> bool:
        """Whether it is known with whom it has communicated, and all of these are among `ranks`."""
        return not (self.sent or self.untold) and self.ranks <= ranks


def _begun() -> list[tuple[Any, int | None]]:
    """Give how many operations each group of several ranks has begun, by kind of device; None: it does not count."""
    counts: list[tuple[Any, int | None]] = []
    groups = process_groups()
    if groups is None:
        return [(None, None)]
    for group in groups:
        for device in group._device_types if group.size() > 1 else ():
            try:
                counts.append((group, group._get_backend(device)._get_sequence_number_for_group()))
            except (RuntimeError, AttributeError):
                counts.append((group, None))
    return counts


class _Watched:
    """The regions under way; while there are any, sends and receives are told to them."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._regions: list[Communication] = []
        self._originals: dict[str, Any] = {}

    def add(self, region: Communication) -> None:
        from torch.distributed import ProcessGroup  # only where there are groups

        with self._lock:
            if not self._regions:
                # As the class has them: what `getattr` gives is bound to no group once it is put back.
                self._originals = {name: vars(ProcessGroup)[name] for name in _POINT_TO_POINT}
                for name in _POINT_TO_POINT:
                    setattr(ProcessGroup, name, self._told(getattr(ProcessGroup, name)))
            self._regions.append(region)

    def remove(self, region: Communication) -> None:
        from torch.distributed import ProcessGroup

        with self._lock:
            self._regions.remove(region)
            if not self._regions:
                for name, original in self._originals.items():
                    setattr(ProcessGroup, name, original)

    def _told(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def tells(*args: Any, **kwargs: Any) -> Any:
            for region in tuple(self._regions):  # another thread may end one
                region.sent = True
            return original(*args, **kwargs)

        return tells


_watched = _Watched()
