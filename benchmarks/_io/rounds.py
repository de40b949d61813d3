"""Rounds of the io benchmark: every arm in turn moves the same buffers, timed, and every byte read is verified."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

from io_backends import PosixStore, StripedStore

from .._report.results import CannotMeasure
from .arms import Arm, BareArm, StoreArm
from .fio import Fio, Mode
from .memory import Memory, verify
from .peers import make_peers

MODES: tuple[Mode, ...] = ("write", "read", "both")
STORE, FIO, BARE, TWO_PATHS, MORE_WORKERS = "store", "fio", "bare", "two paths", "as many workers"
GIB = 1 << 30
WARM_UP_ROUNDS = 1  # files are laid out, memory is touched


@dataclass(kw_only=True)
class Series:
    """One arm at one size of buffer: a value per timed round in each list, by mode."""

    bytes_per_s: dict[Mode, list[float]] = field(default_factory=dict)
    cpu_s_per_gib: dict[Mode, list[float]] = field(default_factory=dict)
    submit_cpu_s: list[float] = field(default_factory=list)
    submit_wall_s: list[float] = field(default_factory=list)

    def take(self, mode: Mode, nbytes: int, bytes_per_s: float, cpu_s: float) -> None:
        self.bytes_per_s.setdefault(mode, []).append(bytes_per_s)
        self.cpu_s_per_gib.setdefault(mode, []).append(cpu_s / nbytes * GIB)

    def extend(self, other: Series) -> None:
        """With the rounds of another session."""
        for mode, values in other.bytes_per_s.items():
            self.bytes_per_s.setdefault(mode, []).extend(values)
            self.cpu_s_per_gib.setdefault(mode, []).extend(other.cpu_s_per_gib[mode])
        self.submit_cpu_s.extend(other.submit_cpu_s)
        self.submit_wall_s.extend(other.submit_wall_s)


def measure(
    directory: Path, size: int, nbytes: int, *, threads: int, rounds: int, tell: Callable[[str], None]
) -> tuple[dict[str, Series], dict[str, str]]:
    """Every arm over `nbytes` in buffers of `size`, in `rounds` timed rounds; and of peers not there, why.

    Raises:
        WrongBytes: something read is not what was written.
        CannotMeasure: no direct I/O in the directory, or fio fails.
    """
    with ExitStack() as stack:
        sources, targets = Memory(nbytes // size, size), Memory(nbytes // size, size)
        stack.callback(sources.close)
        stack.callback(targets.close)
        sources.fill(size)
        targets.fill(size)  # the same noise: the numbers in it tell them apart
        arms: dict[str, Arm] = {STORE: StoreArm(_open(directory, threads), threads)}
        stack.callback(arms[STORE].close)
        arms[BARE] = BareArm(directory, threads)
        stack.callback(arms[BARE].close)
        arms[TWO_PATHS] = StoreArm(StripedStore([_open(directory, threads) for _ in range(2)]), 2 * threads)
        stack.callback(arms[TWO_PATHS].close)
        arms[MORE_WORKERS] = StoreArm(_open(directory, 2 * threads), 2 * threads)
        stack.callback(arms[MORE_WORKERS].close)
        peers, missing = make_peers(directory, sources, threads)
        for arm in peers.values():
            stack.callback(arm.close)
        fio = _find_fio(directory, nbytes, threads, missing)
        if fio is not None:
            stack.callback(fio.clear)
            fio.lay_out()
        rig = _Rig(sources, targets)
        turns: dict[str, _ArmTurns | _FioTurns] = {}
        for name, arm in (arms | peers).items():
            at_once = 2 * threads if name in (TWO_PATHS, MORE_WORKERS) else threads
            turns[name] = _ArmTurns(rig, name, arm, at_once if name not in peers else 0)
        if fio is not None:
            turns[FIO] = _FioTurns(fio, size)
        found = {name: Series() for name in turns}
        # By lot, not in a fixed order or every other round in reverse: what a disk's host does every few seconds would
        # meet the same arm each time.
        order = random.Random(size)
        for number in range(WARM_UP_ROUNDS + rounds):
            for mode in MODES:
                # One mode of all arms, and only then what was written is verified: a disk's speed drifts by a fifth
                # within seconds, and nearer turns are more alike.
                rig.begin(mode)
                for name in order.sample(list(turns), len(turns)):
                    turns[name].take(mode, found[name] if number >= WARM_UP_ROUNDS else Series())
                for one in turns.values():
                    one.check(mode)
            tell(f"buffers of {size >> 20} MiB, round {number + 1} of {WARM_UP_ROUNDS + rounds}")
    return found, missing


class _Rig:
    """The buffers, and the numbers that make each round's bytes its own."""

    def __init__(self, sources: Memory, targets: Memory) -> None:
        self.sources, self.targets = sources, targets
        self._before, self._now, self._next = 0, 0, 1  # numbers that the bytes of the sources begin with

    def begin(self, mode: Mode) -> None:
        """Where `mode` writes, give the sources bytes they never had."""
        if mode != "read":
            self._before, self._now = self._now, self._next
            self._next = self.sources.number(self._now)

    def wipe(self, arm: Arm) -> None:
        """What is not read from here on shows."""
        self.targets.wipe()
        arm.wipe()

    def verify(self, name: str, targets: Memory) -> None:
        """What was read is what was written."""
        verify(targets, self.sources.words, name)

    def verify_before(self, name: str, targets: Memory) -> None:
        """What was read is what had been written before this mode began."""
        self.sources.number(self._before)
        verify(targets, self.sources.words, name)
        self.sources.number(self._now)


class _ArmTurns:
    """An arm's turns. `at_once`: so many transfers are under way at a time, and into as many targets in turn go the
    reads that count; 0 for an arm that reads into memory of its own.

    Right ahead of what counts all is written once, or read: into other targets, where there are enough. After a pause
    the disk, and threads that have slept, take some time to be fast again; fio has a ramp for that.
    """

    def __init__(self, rig: _Rig, name: str, arm: Arm, at_once: int) -> None:
        self._rig, self._name, self._arm = rig, name, arm
        targets, count = rig.targets, len(rig.targets.views)
        self._few, self._few_of_both = targets, targets
        if at_once:
            self._few, self._few_of_both = targets.in_turn(at_once), targets.in_turn(max(1, at_once // 2))
        self._others = targets.in_turn(at_once, 2 * at_once) if at_once and count >= 4 * at_once else None

    def take(self, mode: Mode, series: Series) -> None:
        """Measure one mode, where the arm has it."""
        if mode in self._arm.modes:
            {"write": self._write, "read": self._read, "both": self._both}[mode](series)

    def check(self, mode: Mode) -> None:
        """Read all that was written in this mode, and verify it."""
        if mode != "read" and mode in self._arm.modes:
            self._rig.wipe(self._arm)
            self._arm.read(self._rig.targets)
            self._arm.unload(self._rig.targets)
            self._rig.verify(self._name, self._rig.targets)

    def _write(self, series: Series) -> None:
        arm, sources = self._arm, self._rig.sources
        arm.load(sources)
        arm.write(sources)
        wall_s, cpu_s = _timed(lambda: arm.write(sources))
        series.take("write", sources.nbytes, sources.nbytes / wall_s, cpu_s)
        if isinstance(arm, StoreArm):
            series.submit_cpu_s.append(arm.submit_cpu_s)
            series.submit_wall_s.append(arm.submit_wall_s)

    def _read(self, series: Series) -> None:
        arm, few = self._arm, self._few
        self._ramp()
        wall_s, cpu_s = _timed(lambda: arm.read(few))
        arm.unload(few)
        self._rig.verify(self._name, few)
        series.take("read", few.nbytes, few.nbytes / wall_s, cpu_s)

    def _both(self, series: Series) -> None:
        arm, few, sources = self._arm, self._few_of_both, self._rig.sources
        self._ramp()
        begun_cpu_s = time.process_time()
        bytes_per_s = arm.both(sources, few)
        cpu_s = time.process_time() - begun_cpu_s
        self._rig.verify_before(self._name, few)
        series.take("both", 2 * sources.nbytes, bytes_per_s, cpu_s)

    def _ramp(self) -> None:
        if self._others is None:
            self._arm.read(self._rig.targets)
        self._rig.wipe(self._arm)
        if self._others is not None:
            self._arm.read(self._others)


class _FioTurns:
    def __init__(self, fio: Fio, size: int) -> None:
        self._fio, self._size = fio, size

    def take(self, mode: Mode, series: Series) -> None:
        run = self._fio.run(mode, self._size)
        series.take(mode, run.nbytes, run.bytes_per_s, run.cpu_s)

    def check(self, mode: Mode) -> None:
        """What fio moves is its own."""


def _timed(call: Callable[[], None]) -> tuple[float, float]:
    """Seconds by the clock on the wall, and CPU seconds of all threads."""
    begun_cpu_s, begun_s = time.process_time(), time.perf_counter()
    call()
    ended_s, ended_cpu_s = time.perf_counter(), time.process_time()
    return ended_s - begun_s, ended_cpu_s - begun_cpu_s


def _open(directory: Path, threads: int) -> PosixStore:
    store = PosixStore(directory, threads=threads)
    if not store.open().direct:
        store.close()
        raise CannotMeasure(
            f"there is no direct I/O in {str(directory)!r}, so the page cache would answer; name a folder on a disk "
            "with --path"
        )
    return store


def _find_fio(directory: Path, nbytes: int, threads: int, missing: dict[str, str]) -> Fio | None:
    try:
        return Fio(directory, nbytes, threads)
    except FileNotFoundError as error:
        missing[FIO] = str(error)
        return None


def known(found: Mapping[int, Mapping[str, Series]]) -> list[str]:
    """The names of all arms, in the order of their first turn."""
    return list(dict.fromkeys(name for series in found.values() for name in series))
