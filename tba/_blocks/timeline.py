"""Timeline: when a device did what the host launched.

A host launches ahead of its device. By its clock a step's operators take as long as it takes to launch them, and a
block's second run next to nothing. So the moments that a plan is made from are marked on the device too, by timing
events on the stream that is current, and read when the step is over.

Assumption: what is marked runs on one device, that of the model's first parameter.
"""

from __future__ import annotations

from collections import deque
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .._device import streams
from .._device.kinds import is_streamed
from .._plan import clock


class _Mark(NamedTuple):
    """A moment, by the host's clock, and the device's event."""

    at_s: float
    event: Any


class _Aside(NamedTuple):
    """What is none of the step's own: after how many marks it was, and the events that it lay between."""

    marks: int
    begun: Any
    ended: Any


class Timeline:
    """The moments of one step, and what of it is none of its own: trials, and the host's waiting.

    Between two events that are recorded around a wait nothing is queued, so their distance is how long the device was
    idle for it: nothing, where it was behind the host.

    Attributes:
        aside_s: seconds of the device that were aside; known once the step is over (`times`).
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.aside_s = 0.0
        self._marks: list[_Mark] = []
        self._asides: list[_Aside] = []
        self._aside = False
        self._begun = self._last = _recorded(self._device)

    @classmethod
    def of(cls, model: nn.Module | None) -> Timeline | None:
        """Begin one for a model on a device; None for one on a host."""
        first = next(model.parameters(), None) if model is not None else None
        if first is None or not is_streamed(first) or streams.capturing(first):
            return None
        return cls(first.device)

    def mark(self, at_s: float) -> None:
        """Mark the moment that is `at_s` by the host's clock, less what was aside."""
        if not streams.capturing_here():  # by a program that captures a block in its first call
            self._marks.append(_Mark(at_s, _recorded(self._device)))

    def touch(self) -> None:
        """Mark the end of the step, as far as is known."""
        if self._last is self._begun:
            self._last = torch.Event(self._device, enable_timing=True)
        self._last.record(streams.current(self._device))

    def step_aside(self) -> Any:
        """Mark the begin of what is none of the step's own; give the result to `step_back` at its end."""
        if self._aside:
            return None  # it is within another
        self._aside = True
        return _recorded(self._device)

    def step_back(self, begun: Any) -> None:
        """Mark its end."""
        if begun is not None:
            self._aside = False
            self._asides.append(_Aside(len(self._marks), begun, _recorded(self._device)))

    def times(self) -> dict[float, float]:
        """Give the device's time of each moment, by the host's, and no earlier than that. It waits for the device."""
        times, asides = {}, deque(self._asides)
        self.aside_s = 0.0
        for number, (at_s, event) in enumerate(self._marks):
            while asides and asides[0].marks <= number:
                aside = asides.popleft()
                aside.ended.synchronize()
                self.aside_s += _between_s(aside.begun, aside.ended)
            event.synchronize()
            times[at_s] = max(at_s, _between_s(self._begun, event) - self.aside_s)
        return times

    def step(self) -> tuple[float, float] | None:
        """Give the seconds from begin to end, and those of them that were aside; None while the device is not so far.

        It does not wait.
        """
        if self._last is self._begun or not self._last.query():
            return None
        asides = [aside for aside in self._asides if aside.ended.query()]
        return _between_s(self._begun, self._last), sum(_between_s(aside.begun, aside.ended) for aside in asides)


def _recorded(device: torch.device) -> Any:
    """Record a timing event on the stream that is current."""
    event = torch.Event(device, enable_timing=True)
    event.record(streams.current(device))
    return event


def _between_s(one: Any, other: Any) -> float:
    return float(one.elapsed_time(other)) * 1e-3


class Stopwatch:
    """Seconds that something takes on the device of a tensor, from its making until the last `lap`."""

    def __init__(self, tensor: Tensor | None) -> None:
        self._device = tensor.device if tensor is not None and is_streamed(tensor) else None
        self._begun_s = self._lap_s = clock.current.now_s()
        self._begun = self._lap = None if self._device is None else _recorded(self._device)

    def lap(self) -> None:
        """Note that it goes on until here at least."""
        self._lap_s = clock.current.now_s()
        self._lap = None if self._device is None else _recorded(self._device)

    @property
    def seconds(self) -> float:
        """The seconds. It waits for a device."""
        if self._lap is None or self._lap is self._begun:
            return self._lap_s - self._begun_s
        self._lap.synchronize()
        return max(self._lap_s - self._begun_s, _between_s(self._begun, self._lap))
