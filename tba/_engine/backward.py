"""Backward: signals are held back from the engine's code in backward too, outside of the context.

Entering the context arms `io_backends.interrupts`; a backward may run after it was left, and the first that it runs of
ours is a hook, where autograd records nothing. So what has armed for a forward that has saved something is succeeded by
what arms for its backward, until one has ended. One that fails does not tell: that it has is seen at the end of the
next, or where a context is left.
"""

from __future__ import annotations

from torch.autograd import Variable

from io_backends import interrupts

from .._torch.private import current_graph_task_id

_armed = False


def expect() -> None:
    """Note that a forward has ended, and its backward is to come."""
    global _armed
    _armed = _armed or interrupts.arm()


def begins() -> None:
    """Note that the backward under way asks an engine for its first tensor."""
    global _armed
    if not interrupts.on_main_thread():
        return
    before, _armed = _armed, interrupts.arm()  # the program may have set another handler since
    if before:
        interrupts.disarm(leaves=False)
    Variable._execution_engine.queue_callback(_ended)


def look() -> None:
    """Check for a backward that has failed, or never came: none tells that it has ended."""
    if _armed and current_graph_task_id() == -1:
        _ended()


def mend() -> None:
    """Where nothing of ours is entered: hold nothing back any more, if an exception has broken a `disarm` off."""
    global _armed
    if interrupts.overdue(int(_armed)):
        _armed = False
        interrupts.reset()


def _ended() -> None:
    global _armed
    if _armed and interrupts.on_main_thread():
        _armed = False
        interrupts.disarm(leaves=False)
    if interrupts.pending:
        _ = [*interrupts.again]
