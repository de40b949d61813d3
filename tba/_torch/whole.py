"""Whole: keeps the saved tensors of compiled graphs that make up nearly the whole step, as moving them saves nothing.

A compiled backward asks for everything its graph saved when it begins. If the graph is that of the whole model, all of
it comes back at once and takes as much memory as in plain PyTorch, so every byte was written for nothing. From the
second step on such a graph's tensors stay in memory, and the user is told. If a model is compiled block by block, one
block comes back at a time, and its tensors move.
"""

from __future__ import annotations

import sys
import threading

from .private import compiled_graph
from .user_frames import Notices

# A compiled graph that saves at least this share of a step's bytes counts as the whole model: moving its tensors lowers
# the peak at most by the remaining share, about what the buffers take.
_WHOLE_STEP_SHARE = 0.8


class _Run(threading.local):
    """A thread's saving node, and how much it has saved so far."""

    def __init__(self) -> None:
        self.sequence_nr = -1
        self.nbytes = 0
        self.looked = False  # whether `graph` has been looked up
        self.graph: int | None = None


class Whole:
    """Learns which compiled graphs are not worth moving. The engine's lock guards it."""

    def __init__(self, tier: str) -> None:
        self._tier = tier
        self._run = _Run()
        self._graphs: set[int] = set()
        self._largest: tuple[int, int] | None = None  # most bytes that a compiled graph saved in this step; its number
        self._notices = Notices()

    def keeps(self, sequence_nr: int, nbytes: int) -> bool:
        """Count a tensor that a node saves at this sequence number of autograd; return whether its graph stays.

        Call it within the pack hook, because the graph is found from the hook's caller.
        """
        run = self._run
        if run.sequence_nr != sequence_nr:
            run.sequence_nr, run.nbytes, run.looked, run.graph = sequence_nr, nbytes, False, None
            if not self._graphs:  # a lookup costs more than the rest, and most operators save one tensor
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

    def tell_exact(self, preset: str) -> None:
        """If compiled code calls the pack hook, say once that what it saves stays exact under a lossy preset."""
        if "exact" in self._notices.said or compiled_graph(sys._getframe(1)) is None:
            return
        self._notices.say(
            "exact",
            f"compress={preset!r}: what compiled code saves stays exact, because nothing tells which of its operators "
            "saved it; tier and budget count it at full size. Do not compile layers whose activations should shrink, "
            "or compile without compress=",
        )

    def tell_pool(self) -> None:
        """Say once that what is in the memory of CUDA graphs stays."""
        self._notices.say(
            "pool",
            f"tier={self._tier!r}: saved tensors in the memory of CUDA graphs stay there (torch.compile with mode "
            "'reduce-overhead' or 'max-autotune'; also memory of other libraries): the graphs would be recorded again "
            "if it were freed early. Compile with the default mode or 'max-autotune-no-cudagraphs', and they move",
        )

    def leave_to_graphs(self) -> None:
        """Know that saved tensors move within compiled graphs: what these leave stays, and nobody need be told."""
        self._notices.said.add("whole")

    def end_step(self, step_bytes: int, *, moves: bool) -> None:
        """End a step that saved `step_bytes` worth moving; `moves`: whether any of them move."""
        largest, self._largest = self._largest, None
        if largest is None:
            return
        nbytes, graph = largest
        if nbytes < _WHOLE_STEP_SHARE * step_bytes:
            self._graphs.discard(graph)
        elif moves:
            self._graphs.add(graph)
            self._notices.say(
                "whole",
                f"tier={self._tier!r}: {nbytes:,} of the {step_bytes:,} bytes that a step saves are compiled as one "
                "graph, which gets them all back at once when its backward begins; they stay in memory from now on. "
                "On a CPU, in one process, they move within the graph where the context has this model, compiled by "
                "Inductor in its default mode, and no compress=, blocks= or policy=; elsewhere with "
                "`backend=tba.compile_backend(...)`. Or compile each block (`block.compile()`), so that one block "
                "comes back at a time",
            )
