"""Backward: interrupts are held back from the engine's code wherever a backward runs, outside of the context too.

Entering the context arms `io_backends.interrupts`, but backward may run after it was left. The first record that a
backward asks for arms them as well, until that backward has ended. One that fails does not tell: that it has is seen at
the end of the next, or where a context is left.
"""

from __future__ import annotations

from torch.autograd import Variable

from io_backends import interrupts

from .._torch.private import current_graph_task_id

task = -1  # the backward (graph task) that was seen last
_armed = False


def begins(number: int) -> None:
    """Note that a backward, the graph task `number`, asks for its first record."""
    global task, _armed
    task = number
    if number == -1 or not interrupts.on_main_thread():
        return
    if _armed:  # of one that failed; the program may have set another handler since
        interrupts.disarm(leaves=False)
    _armed = interrupts.arm()
    Variable._execution_engine.queue_callback(_ended)


def look() -> None:
    """Check for a backward that has failed, which does not tell that it has ended."""
    if _armed and current_graph_task_id() == -1:
        _ended()


def _ended() -> None:
    global _armed
    if _armed and interrupts.on_main_thread():
        _armed = False
        interrupts.disarm(leaves=False)
    if interrupts.pending:
        _ = [*interrupts.again]
