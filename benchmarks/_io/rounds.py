"""Rounds of the io benchmark: every arm in turn moves the same buffers, timed, and what it wrote is verified."""

from __future__ import annotations

import random
import shutil
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

from io_backends import PosixStore, StripedStore

from .._report.results import CannotMeasure
from .arms import Rig, StoreArm
from .fio import Fio, Mode
from .memory import Memory, verify, wipe

MODES: tuple[Mode, ...] = ("write", "read", "both")
STORE, TWO_PATHS, FIO = "store", "two paths", "fio"
GIB = 1 << 30
WARM_UP_ROUNDS = 1  # lays out files and touches memory


@dataclass(kw_only=True)
class Series:
    """Measurements of one arm at one size of buffer: by mode, a value per timed round."""

    bytes_per_s: dict[Mode, list[float]] = field(default_factory=dict)
    cpu_s_per_gib: dict[Mode, list[float]] = field(default_factory=dict)
    submit_cpu_s: list[float] = field(default_factory=list)
    submit_wall_s: list[float] = field(default_factory=list)

    def take(self, mode: Mode, nbytes: int, bytes_per_s: float, cpu_s: float) -> None:
        """Add a round's bandwidth, and the CPU time for the `nbytes` moved in it."""
        self.bytes_per_s.setdefault(mode, []).append(bytes_per_s)
        self.cpu_s_per_gib.setdefault(mode, []).append(cpu_s / nbytes * GIB)


def measure(
    found: dict[str, Series],
    directory: Path,
    size: int,
    nbytes: int,
    *,
    threads: int,
    rounds: int,
    fio_run_ms: int,
    tell: Callable[[str], None],
) -> None:
    """Add `rounds` timed rounds of every arm to `found`; fio is one of them if it is installed.

    A round moves `nbytes` in buffers of `size`.

    Raises:
        CannotMeasure: a read returned wrong bytes, the directory has no direct I/O, or fio fails.
    """
    with ExitStack() as stack:
        count = nbytes // size
        rig = Rig(Memory(count, size), Memory(count, size), Memory(2 * threads, size))
        for memory in rig:
            stack.callback(memory.close)
            memory.fill(size)  # with noise; the numbers in it identify the buffers
        arms: dict[str, StoreArm] = {STORE: StoreArm(_open(directory, threads), threads, rig)}
        stack.callback(arms[STORE].close)
        arms[TWO_PATHS] = StoreArm(StripedStore([_open(directory, threads) for _ in range(2)]), 2 * threads, rig)
        stack.callback(arms[TWO_PATHS].close)
        fio = Fio(directory, nbytes, threads, run_ms=fio_run_ms) if shutil.which("fio") else None
        if fio:
            stack.callback(fio.clear)
            fio.lay_out()
        names = [*arms, *([FIO] if fio else [])]
        order, next_number = random.Random(size), 1  # random: periodic work of the disk's host then hits no arm more
        for number in range(WARM_UP_ROUNDS + rounds):
            for mode in MODES:
                if mode != "read":
                    next_number = rig.sources.number(next_number)  # bytes that the sources never had
                # Verify only after all arms had this mode: a disk's speed drifts by a fifth within seconds, so turns
                # that are compared should be close together.
                for name in order.sample(names, len(names)):
                    series = found.setdefault(name, Series()) if number >= WARM_UP_ROUNDS else Series()
                    if name in arms:
                        take(arms[name], mode, rig, series, name)
                    elif fio is not None:
                        run = fio.run(mode, size)
                        series.take(mode, run.nbytes, run.bytes_per_s, run.cpu_s)
                for name, arm in arms.items():
                    check(arm, mode, rig, name)
            tell(f"buffers of {size >> 20} MiB, round {number + 1} of {WARM_UP_ROUNDS + rounds}")


def take(arm: StoreArm, mode: Mode, rig: Rig, series: Series, name: str) -> None:
    """Measure one turn of an arm; verify the reads that precede timed ones."""
    if mode == "write":
        arm.write()
    else:
        wipe(arm.found)
        arm.warm_read()
    begun_cpu_s, begun_s = time.process_time(), time.perf_counter()
    bytes_per_s = getattr(arm, mode)()
    ended_s, ended_cpu_s = time.perf_counter(), time.process_time()
    nbytes = rig.sources.nbytes
    moved = 2 * nbytes if mode == "both" else nbytes
    series.take(mode, moved, bytes_per_s or nbytes / (ended_s - begun_s), ended_cpu_s - begun_cpu_s)
    if mode == "write":
        series.submit_cpu_s.append(arm.submit_cpu_s)
        series.submit_wall_s.append(arm.submit_wall_s)
    if mode == "read":
        verify(arm.found, rig.sources.words, name)


def check(arm: StoreArm, mode: Mode, rig: Rig, name: str) -> None:
    """Read and verify everything written in this mode."""
    if mode != "read":
        wipe(arm.found)
        arm.warm_read()
        verify(arm.found, rig.sources.words, name)


def _open(directory: Path, threads: int) -> PosixStore:
    store = PosixStore(directory, threads=threads)
    if not store.open().direct:
        store.close()
        raise CannotMeasure(
            f"there is no direct I/O in {str(directory)!r}, so the page cache would be measured; name a folder on a "
            "disk with --path"
        )
    return store
