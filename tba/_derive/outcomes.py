"""Outcomes: whether a device has made the right tensors again, which it says only once it has come there.

Guarantees:

1. A backward that has used a wrong tensor raises `EditedError` before it returns. Outside of a backward, whoever asks
   for the tensor waits and gets the error.
2. Until a backward ends, nobody waits for the device.

Assumption: PyTorch runs what `queue_callback` was given once everything of that graph task has been launched, and an
exception of it leaves `backward()` (observed on torch 2.13, tested).

A backward that fails leaves its outcomes here, unasked. Some may be waiting while other backwards run, so only the
oldest of many go.

Takes no lock: several threads may add to one graph task (one a device), which single calls of dict and list allow.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

from torch import Tensor
from torch.autograd import Variable

from .._device import streams
from .._errors import EditedError
from .._torch.private import current_graph_task_id
from .trust import Trust

_MOST_TASKS = 64  # that may have failed


class _Outcome(NamedTuple):
    """One comparison.

    Attributes:
        differs: on the host, or being copied there.
        there: the event that completes it.
        trust: lost if the tensor was wrong.
        error: what to raise then.
    """

    differs: Tensor
    there: Any
    trust: Trust
    error: str


class Outcomes:
    """Comparisons that a device has not ended, by the graph task that uses what they compare."""

    def __init__(self) -> None:
        self._open: dict[int, list[_Outcome]] = {}

    def add(self, differs: Tensor, trust: Trust, error: str) -> None:
        """Add a comparison: `differs` is on the device, and `error` is raised if it is true. Raises EditedError."""
        outcome = _Outcome(*streams.fetch(differs), trust, error)
        task = current_graph_task_id()
        if task == -1:
            _ask([outcome])
            return
        new = [outcome]
        if (known := self._open.setdefault(task, new)) is not new:
            known.append(outcome)
            return
        Variable._execution_engine.queue_callback(partial(self._confirm, task))
        while len(self._open) > _MOST_TASKS:
            self._open.pop(min(self._open), None)

    def _confirm(self, task: int) -> None:
        _ask(self._open.pop(task, []))


def _ask(outcomes: list[_Outcome]) -> None:
    """Wait for the device, and raise the first error. Raises EditedError."""
    wrong = []
    for outcome in outcomes:
        outcome.there.synchronize()
        if bool(outcome.differs):
            outcome.trust.lose()
            wrong.append(outcome.error)
    if wrong:
        raise EditedError(wrong[0])
