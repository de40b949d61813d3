"""Fork: the engine ends in a forked child. Hooks pass tensors through, finalisers do nothing, stored bytes are gone.

The I/O layer pauses its transfers around the fork and closes its files in the child (`io_backends._workers.fork`).
"""

from __future__ import annotations

import os
import weakref
from typing import Protocol


class Mortal(Protocol):
    """Object that is told of a fork."""

    def die(self) -> None:
        """Stop acting, in a forked child."""


_known: weakref.WeakSet[Mortal] = weakref.WeakSet()


def dies_in_child(engine: Mortal) -> None:
    """Call `engine.die` in every child forked while it lives."""
    _known.add(engine)


def _after_fork_in_child() -> None:
    for engine in list(_known):
        engine.die()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork_in_child)
