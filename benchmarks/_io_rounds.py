"""Rounds of the io benchmark: every arm in turn moves the same buffers, timed, and every byte read is verified."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

from io_backends import PosixStore, StripedStore

from ._fio import Fio, Mode
from ._io_arms import Arm, BareArm, StoreArm
from ._io_memory import Memory, verify
from ._io_peers import make_peers
from ._processes import ArmError

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


def measure(
    directory: Path, size: int, nbytes: int, *, threads: int, rounds: int, tell: Callable[[str], None]
) -> tuple[dict[str, Series], dict[str, str]]:
    """Every arm over `nbytes` in buffers of `size`, in `rounds` timed rounds; and of peers not there, why.

    Raises:
        WrongBytes: something read is not what was written.
        ArmError: no direct I/O in the directory, or fio fails.
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
        turns: dict[str, Callable[[Series], None]] = {}
        for name, arm in (arms | peers).items():
            at_once = 2 * threads if name in (TWO_PATHS, MORE_WORKERS) else threads
            few, others = (targets, None) if name in peers else (targets.in_turn(at_once), rig.others(at_once))
            turns[name] = _turn_of(rig, name, arm, few, others)
        if fio is not None:
            turns[FIO] = _turn_of_fio(fio, size)
        found = {name: Series() for name in turns}
        # By lot, not in a fixed order or every other round in reverse: what a disk's host does every few seconds would
        # meet the same arm each time.
        order = random.Random(size)
        for number in range(WARM_UP_ROUNDS + rounds):
            for name in order.sample(list(turns), len(turns)):
                turns[name](found[name] if number >= WARM_UP_ROUNDS else Series())
            tell(f"buffers of {size >> 20} MiB, round {number + 1} of {WARM_UP_ROUNDS + rounds}")
    return found, missing


class _Rig:
    """The buffers, and the numbers that make each round's bytes its own."""

    def __init__(self, sources: Memory, targets: Memory) -> None:
        self.sources, self.targets = sources, targets
        self._next = 1

    def renew(self) -> int:
        """Give the sources bytes they never had; the first of their numbers."""
        first = self._next
        self._next = self.sources.number(first)
        return first

    def others(self, count: int) -> Memory | None:
        """Targets in turn that `targets.in_turn(count)` does not use; None if there are too few for that."""
        return self.targets.in_turn(count, 2 * count) if len(self.targets.views) >= 4 * count else None

    def read(self, name: str, arm: Arm, targets: Memory, others: Memory | None = None) -> tuple[float, float]:
        """Time a read, and verify what it brought against the sources as they are.

        Right ahead of it, not counted, all is read into `others`: after a pause the disk, and threads that have slept,
        take some time to be fast again. fio has a ramp for that.
        """
        self.targets.wipe()
        arm.wipe()
        if others is not None:
            arm.read(others)
        spent = _timed(lambda: arm.read(targets))
        arm.unload(targets)
        verify(targets, self.sources.words, name)
        return spent


def _turn_of(rig: _Rig, name: str, arm: Arm, few: Memory, others: Memory | None) -> Callable[[Series], None]:
    """`few`: the targets of reads that count; `others`: of those right ahead of them."""
    sources = rig.sources

    def turn(series: Series) -> None:
        first = rig.renew()
        arm.load(sources)
        arm.write(sources)  # not counted, see `_Rig.read`
        wall_s, cpu_s = _timed(lambda: arm.write(sources))
        series.take("write", sources.nbytes, sources.nbytes / wall_s, cpu_s)
        if isinstance(arm, StoreArm):
            series.submit_cpu_s.append(arm.submit_cpu_s)
            series.submit_wall_s.append(arm.submit_wall_s)
        rig.read(name, arm, rig.targets)
        wall_s, cpu_s = rig.read(name, arm, few, others)
        series.take("read", few.nbytes, few.nbytes / wall_s, cpu_s)
        if "both" not in arm.modes:
            return
        later = rig.renew()  # what is written now is not what is read
        rig.targets.wipe()
        if others is not None:
            arm.read(others)
        wall_s, cpu_s = _timed(lambda: arm.both(sources, few))
        sources.number(first)
        verify(few, sources.words, name)
        sources.number(later)
        rig.read(name, arm, rig.targets)
        series.take("both", 2 * sources.nbytes, 2 * sources.nbytes / wall_s, cpu_s)

    return turn


def _turn_of_fio(fio: Fio, size: int) -> Callable[[Series], None]:
    def turn(series: Series) -> None:
        for mode in MODES:
            run = fio.run(mode, size)
            series.take(mode, run.nbytes, run.bytes_per_s, run.cpu_s)

    return turn


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
        raise ArmError(
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
