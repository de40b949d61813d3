"""Ledger: bytes of saved tensors in memory, by what holds them, and what the budget leaves for more.

    budget    |<----------------------------- room ----------------------------->|
    in memory | passed | read back | held | in flight |                          |
    reserved  |                                       |  replay | trial | largest |
              |<--------- may be held, limit_bytes ------------>|

- *Passed*: kept by graphs without a record. *Held*: records that may still be written. *In flight*: on their way out.
- The *largest* tensor is being computed before a hook hears of it. A *trial* of a block needs memory for its copies and
  its second run. A *replay* is what a block has again when it recomputes; reads leave room for it, held records do not.

What a budget leaves is computed here alone: for the engine, and for plans (`_plan`), which must foresee what it does.

Wants the engine's lock held.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn

from .._config import OffloadConfig
from .._stats import Counters, Recorder
from . import limits as _limits
from .limits import Limits
from .passed import Passed
from .pressure import Pressure
from .room import Room


def held_limit_bytes(budget_bytes: int, largest_bytes: int, trial_bytes: int = 0) -> int:
    """Return the bytes that saved tensors may hold of a budget; below 0 if it is too small for what is reserved."""
    return budget_bytes - largest_bytes - trial_bytes


def read_limit_bytes(limit_bytes: int, replay_bytes: int, kept_bytes: int, out_bytes: int) -> int:
    """Return the bytes that may be read back: what is neither kept, nor on its way out, nor reserved for a replay."""
    return limit_bytes - replay_bytes - kept_bytes - out_bytes


class Expected(NamedTuple):
    """What the step under way is expected to need.

    Attributes:
        sent_bytes: that its plan sends.
        largest_bytes: of the largest tensor that it saves by its plan; 0 without one.
        replay_bytes: of the largest block that recomputes.
        trial_bytes: for the copies and the second run of a block that is tried.
        link_bytes_per_s: that the link carries out by its plan.
    """

    sent_bytes: int = 0
    largest_bytes: int = 0
    replay_bytes: int = 0
    trial_bytes: int = 0
    link_bytes_per_s: float = 0.0


class Peaks(NamedTuple):
    """The most that saved tensors of a step held in memory at once, and would have held (`plain_bytes`).

    What is held has the largest block that runs again in it: the first does when what is held is at its peak, or near.
    """

    plain_bytes: int
    held_bytes: int


class InFlight(Protocol):
    """Bytes on their way out of memory, as `Staging` counts them."""

    @property
    def bytes(self) -> int:
        """The bytes."""


class Ledger:
    """Ledger of one engine.

    Tiers `nvme` and `cpu` hold back and read ahead a window each. Tier `auto` shares a budget that was set among all;
    without one it holds what memory has room for, and reads ahead into the reserve.

    Attributes:
        limited: whether a budget was set.
        held_bytes: of records that are held.
        read_back_bytes: of records that read-ahead has in memory.
        window_bytes: to hold back from writing and to read ahead, by the largest record sent so far.
        read_ahead_bytes: of the window, most to be read ahead.
        expected: of the step under way.
        watched_peak_bytes: most in memory since `watch_peak`.
        due_bytes: that stay without a record, whose operators may still be running.
    """

    def __init__(
        self,
        config: OffloadConfig,
        limits: Limits,
        pressure: Pressure,
        in_flight: InFlight,
        counters: Counters,
        recorder: Recorder,
        model: Callable[[], nn.Module | None],
    ) -> None:
        self._adapts = config.tier == "auto"
        self.limited = self._adapts and config.memory_budget is not None
        self.held_bytes = self.read_back_bytes = 0
        self._passed, self._passed_shared = Passed(), Passed()
        self.due_bytes = 0
        self._recorded_bytes = 0  # of records that graphs own, as they were saved
        self._recomputed = Passed()  # what blocks would have saved that run again
        self._plain_peak_bytes = self._replay_bytes = 0  # in this step; the largest block that runs again
        self.expected = Expected()
        self.watched_peak_bytes = 0
        self._limits = limits
        self._in_flight = in_flight
        self._counters = counters
        self._recorder = recorder
        self._room = Room(config.memory_budget, limits, pressure, model)
        self._largest_bytes = self._step_largest_bytes = 0  # of what was saved, ever and in this step
        self._largest_sent_bytes = -1
        self.sent(0)

    # -- what happens ------------------------------------------------------------------------------------------------

    def save(self, nbytes: int) -> None:
        """Count a record that a graph owns, wherever its bytes are."""
        self._recorded_bytes += nbytes
        self._note_plain(self.passed_bytes)

    def bury(self, nbytes: int, read_back_bytes: int) -> None:
        """Count a record no longer, as it has died: it was saved with `nbytes`, read-ahead had `read_back_bytes`."""
        self._recorded_bytes -= nbytes
        self.read_back_bytes -= read_back_bytes

    def await_operator(self, nbytes: int) -> None:
        """Count what stays without a record until its operator has finished (`keep`)."""
        self.due_bytes += nbytes

    def recompute(self, graph: object, nbytes: int, small_bytes: int = 0) -> None:
        """Count a block that runs again, for as long as its graph lives.

        Args:
            graph: dies with the graph.
            nbytes: that the block would have saved beside what it has.
            small_bytes: of its input, kept without a record.
        """
        if small_bytes:
            self._passed.add(graph, small_bytes)
        self._recomputed.add(graph, nbytes - small_bytes)
        self._replay_bytes = max(self._replay_bytes, nbytes)
        passed_bytes = self.passed_bytes
        self._note_plain(passed_bytes)
        self._note_held(passed_bytes)

    def hold(self, nbytes: int, plain_bytes: int, device: torch.device) -> None:
        """Count a new record that is held, of `plain_bytes` before any codec, and look at memory now and then."""
        self.held_bytes += nbytes
        if plain_bytes > self._step_largest_bytes:
            self._meet(plain_bytes)
        if self._adapts and self._room.fill(nbytes, device):
            self.look_at_room()
        self._note_held(self.passed_bytes)

    def count_held(self, nbytes: int) -> None:
        """Count a record that is held once more; below 0, one that is sent or has died."""
        self.held_bytes += nbytes

    def count_read_back(self, nbytes: int) -> None:
        """Count a record that read-ahead has in memory; below 0, one that it has no longer."""
        self.read_back_bytes += nbytes

    def keep_awaited(self, finished: Iterable[tuple[Tensor, int, bool]]) -> None:
        """Count what was awaited, each as `keep` does: (tensor, bytes, whether the program may own it too)."""
        for tensor, nbytes, shared in finished:
            self.due_bytes -= nbytes
            (self._passed_shared if shared else self._passed).add(tensor, nbytes)
            if nbytes > self._step_largest_bytes:
                self._meet(nbytes)
        passed_bytes = self.passed_bytes
        self._note_plain(passed_bytes)
        self._note_held(passed_bytes)

    def keep(self, tensor: Tensor, nbytes: int, *, shared: bool) -> None:
        """Count a tensor that stays without a record while it lives; one that the program may own too, in this step."""
        (self._passed_shared if shared else self._passed).add(tensor, nbytes)
        if nbytes > self._step_largest_bytes:
            self._meet(nbytes)
        passed_bytes = self.passed_bytes
        self._note_plain(passed_bytes)
        self._note_held(passed_bytes)

    def sent(self, nbytes: int) -> None:
        """Learn the size of a record that was sent: the window depends on the largest."""
        if nbytes > self._largest_sent_bytes:
            self._largest_sent_bytes = nbytes
            self.window_bytes = _limits.window_bytes(self._limits, nbytes)
            self.read_ahead_bytes = _limits.read_ahead_bytes(self.window_bytes, nbytes)

    def expect(self, expected: Expected) -> None:
        """Reserve for the step under way. Replays of forwards that began before in this step keep their room."""
        replay_bytes = max(self.expected.replay_bytes, expected.replay_bytes)
        self.expected = expected._replace(replay_bytes=replay_bytes)

    def forget_replays(self) -> None:
        """Reserve nothing for replays: the step that had them has ended."""
        self.expected = self.expected._replace(replay_bytes=0)

    def end_step(self) -> Peaks:
        """End a step, and return its peaks; memory is looked at anew in the next one."""
        peaks = Peaks(self._plain_peak_bytes, self.watched_peak_bytes + self._replay_bytes)
        self._room.end_step(self.watched_peak_bytes)
        self._plain_peak_bytes = self.watched_peak_bytes = self._replay_bytes = 0
        self._step_largest_bytes = 0
        self._passed_shared = Passed()
        return peaks

    def _meet(self, nbytes: int) -> None:
        """Meet the largest tensor of the step so far."""
        self._step_largest_bytes = nbytes
        self._largest_bytes = max(self._largest_bytes, nbytes)

    # -- what is left ------------------------------------------------------------------------------------------------

    @property
    def passed_bytes(self) -> int:
        """Bytes kept without a record; counted under a budget that was set, as free memory lacks them already."""
        own, shared = self._passed, self._passed_shared
        if own.gone:
            own.settle()
        if shared.gone:
            shared.settle()
        return own.nbytes + shared.nbytes

    @property
    def graphs_live(self) -> bool:
        """Whether a graph lives that keeps something without a record which the program does not own."""
        self._passed.settle()
        return self._passed.nbytes > 0

    @property
    def in_memory_bytes(self) -> int:
        """Bytes of saved tensors that are in memory."""
        return self.passed_bytes + self.held_bytes + self._in_flight.bytes + self.read_back_bytes

    @property
    def plain_bytes(self) -> int:
        """Bytes that saved tensors would hold now if none was moved, compressed or recomputed."""
        self._recomputed.settle()
        return self.passed_bytes + self.due_bytes + self._recorded_bytes + self._recomputed.nbytes

    @property
    def limit_bytes(self) -> int:
        """Bytes that may be held; of a budget that was set, all that may be in memory."""
        if not self._adapts:
            return self.window_bytes
        if not self.limited:
            return self._room.nbytes
        expected = self.expected
        planned_bytes = expected.largest_bytes and max(expected.largest_bytes, self._step_largest_bytes)
        largest_bytes = planned_bytes or self._largest_bytes
        return max(0, held_limit_bytes(self._room.nbytes, largest_bytes, expected.trial_bytes))

    @property
    def hold_bytes(self) -> int:
        """Bytes that may be held beside what cannot be sent: passed, or read back for a graph that lives on."""
        return self.limit_bytes - (self.passed_bytes + self.read_back_bytes if self.limited else 0)

    @property
    def over_bytes(self) -> int:
        """Bytes by which held records exceed that; under a budget that was set, with those in flight."""
        if not self.limited:
            return self.held_bytes - self.limit_bytes
        return self.held_bytes + self._in_flight.bytes - self.hold_bytes

    @property
    def read_bytes(self) -> int:
        """Bytes that read-ahead may have in memory now; held records come first, as they were saved last."""
        if not self._adapts:
            return min(self.window_bytes - self.held_bytes, self.read_ahead_bytes)
        if not self.limited:
            return self.read_ahead_bytes  # the reserve has room for it
        kept_bytes = self.passed_bytes + self.held_bytes
        replay_bytes, out_bytes = self.expected.replay_bytes, self._in_flight.bytes
        return min(read_limit_bytes(self.limit_bytes, replay_bytes, kept_bytes, out_bytes), self.read_ahead_bytes)

    def has_room(self, nbytes: int) -> bool:
        """Whether so many bytes may stay without a record, beside what graphs that are not freed hold."""
        in_memory_bytes = self.in_memory_bytes
        return not in_memory_bytes or in_memory_bytes + nbytes <= self.limit_bytes

    @property
    def room_bytes(self) -> int:
        """Bytes that memory had room for when it was looked at; tier `auto` alone looks."""
        return self._room.nbytes

    def look_at_room(self) -> int:
        """Look at memory; returns the bytes it has room for, of what is held and of what may be."""
        return self._room.look(self.held_bytes, self.in_memory_bytes)

    # -- the peak ----------------------------------------------------------------------------------------------------

    def watch_peak(self) -> None:
        """Begin to look for the peak of a step."""
        self.watched_peak_bytes = 0

    def note(self, twice_bytes: int = 0) -> None:
        """Note the bytes in memory, for peaks and timelines; `twice_bytes` of the sum are counted twice."""
        self._note_held(self.passed_bytes, twice_bytes)

    def _note_held(self, passed_bytes: int, twice_bytes: int = 0) -> None:
        nbytes = passed_bytes + self.held_bytes + self._in_flight.bytes + self.read_back_bytes - twice_bytes
        if nbytes > self.watched_peak_bytes:  # of a step, so it may be no more than the peak of all
            self.watched_peak_bytes = nbytes
            self._counters.peak_bytes = max(self._counters.peak_bytes, nbytes)
        if self._recorder.trace is not None:
            now_s = time.perf_counter()
            self._recorder.note("held", now_s, now_s, nbytes, "")
            self._note_plain(passed_bytes)  # it may have fallen

    def _note_plain(self, passed_bytes: int) -> None:
        if self._recomputed.gone:
            self._recomputed.settle()
        nbytes = passed_bytes + self.due_bytes + self._recorded_bytes + self._recomputed.nbytes
        if nbytes > self._plain_peak_bytes:
            self._plain_peak_bytes = nbytes
        if self._recorder.trace is not None:
            now_s = time.perf_counter()
            self._recorder.note("plain", now_s, now_s, nbytes, "")

    def may_peak(self) -> bool:
        """Whether `note` might have something to tell."""
        return self._recorder.trace is not None or self.in_memory_bytes > self.watched_peak_bytes
