"""Whole: compiled graphs that save nearly all that a step saves, so that moving it out saves no memory.

A compiled backward asks for everything its graph has saved when it begins. A graph compiled from the whole model has
all of it back at once, in as much memory as plain PyTorch takes, and every byte was written for nothing. So what such a
graph saves stays, from the second step on, and the user is told. Of a model compiled block by block, one block comes
back at a time: it moves.
"""

from __future__ import annotations

import sys
import threading

from .private import compiled_graph
from .user_frames import warn

# A compiled graph that saves at least this share of a step's bytes is the whole model. Moved, so much of the peak would
# stay as it is, and what remains is no more than buffers take.
_WHOLE_STEP_SHARE = 0.8


class _Run(threading.local):
    """Per thread: what the node that saves now has saved so far."""

    def __init__(self) -> None:
        self.sequence_nr = -1
        self.nbytes = 0
        self.looked = False  # whether the graph has been looked for
        self.graph: int | None = None


class Whole:
    """Learns which compiled graphs are worth no moving. The engine's lock guards it."""

    def __init__(self, tier: str) -> None:
        self._tier = tier
        self._run = _Run()
        self._graphs: set[int] = set()
        # Of this step's compiled graphs, the one that has saved most: how much, and its number.
        self._largest: tuple[int, int] | None = None
        self._told = False

    def keeps(self, sequence_nr: int, nbytes: int) -> bool:
        """Count a tensor that a node saves at this sequence number of autograd's; whether it stays, as its graph does.

        To be called from within the pack hook, whose caller tells the graph.
        """
        run = self._run
        if run.sequence_nr != sequence_nr:
            run.sequence_nr, run.nbytes, run.looked, run.graph = sequence_nr, nbytes, False, None
            if not self._graphs:  # a look costs more than the rest, and most operators save one tensor
                return False
        else:
            run.nbytes += nbytes
        if not run.looked:
            run.looked, run.graph = True, compiled_graph(sys._getframe(1))
        if run.graph is None:
            return False
        if self._largest is None or run.nbytes > self._largest[0]:
            self._largest = run.nbytes, run.graph
        return run.graph in self._graphs

    def end_step(self, step_bytes: int, *, moves: bool) -> None:
        """A step is over that saved so much worth moving; whether any of it moves."""
        largest, self._largest = self._largest, None
        if largest is None:
            return
        nbytes, graph = largest
        if nbytes < _WHOLE_STEP_SHARE * step_bytes:
            self._graphs.discard(graph)
        elif moves:
            self._graphs.add(graph)
            self._tell(nbytes, step_bytes)

    def _tell(self, nbytes: int, step_bytes: int) -> None:
        if self._told:
            return
        self._told = True
        warn(
            f"tier={self._tier!r}: {nbytes:,} of the {step_bytes:,} bytes that a step saves are compiled as one graph, "
            "which gets them all back at once when its backward begins; they stay in memory from now on. Compile each "
            "block instead (`block.compile()`), and one block comes back at a time"
        )
