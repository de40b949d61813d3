"""Fork: in a forked child the engine is dead. Hooks pass through, finalisers do nothing, what was stored is gone.

The I/O layer holds its transfers back around the fork and closes its files in the child (`io_backends._workers.fork`).
"""

from __future__ import annotations

import os
import weakref
from typing import Protocol


class Mortal(Protocol):
    """What has to be told."""

    def die(self) -> None:
        """In a forked child: act no more."""


_known: weakref.WeakSet[Mortal] = weakref.WeakSet()


def dies_in_child(engine: Mortal) -> None:
    """Call `engine.die` in every child forked while it lives."""
    _known.add(engine)


def _after_fork_in_child() -> None:
    for engine in list(_known):
        engine.die()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork_in_child)
