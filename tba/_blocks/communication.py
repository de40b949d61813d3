"""Communication: tells whether a forward exchanges data with other ranks.

Each rank plans for itself. A block with a collective inside that runs again on one rank alone would meet, in backward,
whatever its peers exchange next: where the shapes are equal, gradients are wrong and nothing raises. So a block that
communicates is neither tried nor recomputed.

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

from .._torch.private import process_groups

_POINT_TO_POINT = ("send", "recv", "recv_anysource")
_UNKNOWN = -1


class Communication:
    """A region, and whether it communicates: `seen`, once it has ended."""

    def __init__(self) -> None:
        self.seen = False

    def __enter__(self) -> Communication:
        self._before = _begun()
        if self._before:
            _watched.add(self)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._before:
            _watched.remove(self)
        after = _begun()
        self.seen = self.seen or after != self._before or _UNKNOWN in after


def _begun() -> list[int]:
    """Give how many operations each group of several ranks has begun on each kind of device."""
    counts = []
    for group in process_groups():
        for device in group._device_types if group.size() > 1 else ():
            try:
                counts.append(group._get_backend(device)._get_sequence_number_for_group())
            except RuntimeError:  # a backend that does not count
                counts.append(_UNKNOWN)
    return counts


class _Watched:
    """The regions under way; while there are any, sends and receives are told to them."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._regions: list[Communication] = []
        self._originals: dict[str, Callable[..., Any]] = {}

    def add(self, region: Communication) -> None:
        from torch.distributed import ProcessGroup  # only where there are groups

        with self._lock:
            if not self._regions:
                self._originals = {name: getattr(ProcessGroup, name) for name in _POINT_TO_POINT}
                for name, original in self._originals.items():
                    setattr(ProcessGroup, name, self._told(original))
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
            for region in self._regions:
                region.seen = True
            return original(*args, **kwargs)

        return tells


_watched = _Watched()
