"""Cost: what the transfers of one step cost it."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any, Protocol

from .._plan import clock
from .._plan.clock import Carried

_TOO_FEW_BYTES = 4 << 20  # for a rate
_LOST = 1.5  # seconds that a step computing on all cores loses by each CPU second of a thread that moves


@dataclass
class Way:
    """One direction of a link: what it carried, and how long it was busy.

    Attributes:
        nbytes: carried.
        busy_s: seconds in which at least one transfer ran.
    """

    nbytes: int = 0
    busy_s: float = 0.0
    _until_s: float = float("-inf")

    def add(self, nbytes: int, carried: Carried) -> None:
        self.nbytes += nbytes
        self.busy_s += max(0.0, carried.ended_s - max(carried.started_s, self._until_s))
        self._until_s = max(self._until_s, carried.ended_s)

    def sample(self, nbytes: int, seconds: float) -> None:
        """Count a copy that a device has timed; only some are timed."""
        if seconds:
            self.nbytes += nbytes
            self.busy_s += seconds

    @property
    def bytes_per_s(self) -> float:
        """Bytes per second while busy; 0 if too little was carried."""
        return self.nbytes / self.busy_s if self.nbytes >= _TOO_FEW_BYTES and self.busy_s else 0.0


class Aside(Protocol):
    """Marks, on a device, time that is not a step's own (`_blocks.timeline`)."""

    def step_aside(self) -> Any:
        """Mark its beginning."""

    def step_back(self, begun: Any) -> None:
        """Mark its end."""


@dataclass
class Cost:
    """What transfers cost a step: the CPU time of the threads that move them, waiting for them, and the hooks' work.

    A CPU second of a thread that moves counts 1.5 times where a CPU computes (`_LOST`): the computation waits for its
    core, and finds cold caches there; a whole step lost 1.3 (a residual network) to 2.6 of them (GPT) on two cores.
    If the link is too slow the step waits instead, and the larger of the two costs counts.

    What hooks take does not depend on a record's size: 0.25 ms for one in a step, five times as much as in a loop, as
    operators leave caches cold. Beside a device they are hidden, as the host is ahead of it.

    Attributes:
        nbytes: moved, out or back.
        cpu_s: CPU seconds that this took.
        least_cpu_s_per_byte: of the cheapest transfer; that much another byte costs in a transfer that happens anyway.
        waited_s: seconds that forward and backward waited for transfers.
        hooks_s: CPU seconds that hooks took for records in host memory, beside deriving.
        records: made in host memory.
        out, back: the two directions.
        disk_out, disk_back: those of a disk beneath the host memory that a device's link leads to.
        device: where waits are marked, if the model is on a device.
    """

    nbytes: int = 0
    cpu_s: float = 0.0
    least_cpu_s_per_byte: float = 0.0
    waited_s: float = 0.0
    hooks_s: float = 0.0
    records: int = 0
    out: Way = field(default_factory=Way)
    back: Way = field(default_factory=Way)
    disk_out: Way = field(default_factory=Way)
    disk_back: Way = field(default_factory=Way)
    device: Aside | None = None
    _outside_s: float = 0.0  # ever, of the hooks' time: deriving

    def add(self, nbytes: int, carried: Carried, way: Way | None) -> None:
        """Count a transfer that has ended and moved `nbytes`, on its `way`: None if the store had nothing to move."""
        if not nbytes:
            return
        if way is not None:
            way.add(nbytes, carried)
        cpu_s = carried.cpu_s
        least = self.least_cpu_s_per_byte
        self.least_cpu_s_per_byte = min(cpu_s / nbytes, least) if self.nbytes else cpu_s / nbytes
        self.nbytes += nbytes
        self.cpu_s += cpu_s

    def end_step(self) -> None:
        """Begin anew with the next step."""
        self.nbytes, self.cpu_s, self.least_cpu_s_per_byte, self.waited_s = 0, 0.0, 0.0, 0.0
        self.hooks_s, self.records = 0.0, 0
        self.out, self.back, self.disk_out, self.disk_back = Way(), Way(), Way(), Way()
        self.device = None

    def spilled(self, nbytes: int, carried: Carried) -> None:
        """Count a write from host memory to the disk beneath it: of bytes that were counted on their way out."""
        self.disk_out.add(nbytes, carried)
        self.cpu_s += carried.cpu_s

    def mark_waits(self, device: Aside | None) -> None:
        """Mark waits on a device from now on, if the model is on one."""
        self.device = device

    def begin_wait(self) -> Any:
        """Mark that a wait begins; pass the result to `wait` at its end."""
        return None if self.device is None else self.device.step_aside()

    def wait(self, seconds: float, begun: Any = None) -> None:
        self.waited_s += clock.current.waited_s(seconds)
        if self.device is not None:
            self.device.step_back(begun)

    def begin_work(self) -> float:
        """Begin a hook's work for a record in host memory; pass the result to `work` at its end, on this thread.

        By the CPU's clock: what it waits for, the interpreter's lock too, is counted with transfers.
        """
        return time.thread_time() - self._outside_s

    def work(self, begun: float, records: int) -> None:
        """Count a hook's work, which made so many records."""
        self.hooks_s += clock.current.worked_s(max(0.0, self.begin_work() - begun))
        self.records += records

    def leave_out(self, seconds: float) -> None:
        """Leave out of a hook's work what deriving has taken in it, or what is none of the step's own."""
        self._outside_s += seconds

    @property
    def per_record_s(self) -> float:
        """Seconds of hooks for each record; 0 if none was made."""
        return self.hooks_s / self.records if self.records else 0.0

    @property
    def taken_s(self) -> float:
        """Seconds that transfers have taken from the step's computation."""
        return self._lost * self.cpu_s

    @property
    def busy_per_byte_s(self) -> float:
        """Seconds of the step for each byte that goes out and comes back, if nobody waits."""
        return 2 * self.taken_s / self.nbytes if self.nbytes else 0.0

    @property
    def per_byte_s(self) -> float:
        """Seconds of the step for each byte that goes out and comes back, in a transfer of its own."""
        return 2 * max(self.taken_s, self.waited_s) / self.nbytes if self.nbytes else 0.0

    @property
    def per_further_byte_s(self) -> float:
        """Seconds of the step for each byte by which a transfer, out and back, grows."""
        least_s = self._lost * self.least_cpu_s_per_byte
        return 2 * max(least_s, self.waited_s / self.nbytes) if self.nbytes else 0.0

    @property
    def _lost(self) -> float:
        return _LOST if self.device is None else 1.0
