"""The io benchmark: the stores against fio: bandwidth, CPU seconds and the cost of submitting.

Cold (direct I/O, so that no cache answers) and verified: in every round, everything written is read back and compared,
outside the timed region. The arms take turns in a random order, and are compared by medians of ratios within a round.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Annotated

import psutil
import typer

from ._io.fio import RUN_MS, Fio, Mode
from ._io.rounds import FIO, MODES, STORE, TWO_PATHS, Series, measure
from ._report.bar import Bar, bar_table
from ._report.environment import environment_block
from ._report.options import Folder, Quick
from ._report.ratios import doubt, ratios, spread
from ._report.results import MIB, CannotMeasure, Grid, Result
from ._workload.tools import scratch_directory

SIZES = (4 * MIB, 16 * MIB, 64 * MIB)
TOTAL_BYTES = 512 * MIB  # of an arm's turn: some tenths of a second at the speed of an NVMe drive
_SESSIONS = 3
_SHARE_BAR, _STRIPES_BAR, _SUBMIT_BAR_US = 0.90, 1.0, 30.0
_CPU_BARS: dict[Mode, float] = {"write": 0.04, "read": 0.05}
_RAM_FILE_SYSTEMS = frozenset({"tmpfs", "ramfs", "devtmpfs"})
_BARS_NOTE = (
    "Shares: medians of the ratios of bandwidth within a round ± half the interquartile range; over all sizes ± half "
    "the notch of a box plot, about 95 % confidence: two paths count as no slower if 1 is within that. Each path has "
    "its own workers, so two paths have twice as many as one."
)


def io(
    rounds: Annotated[int, typer.Option(min=2, help="Timed turns of each arm.")] = 7,
    threads: Annotated[int, typer.Option(min=1, help="I/O workers of each path, and jobs of fio.")] = 2,
    path: Folder = None,
    quick: Quick = False,
) -> Result:
    """Stores against fio: bandwidth, CPU seconds, cost of submitting (writes some 600 GB)."""
    if quick:
        return run_io(path, sizes=(MIB, 4 * MIB), nbytes=16 * MIB, rounds=2, threads=threads, fio_run_ms=50)
    return run_io(path, rounds=rounds, threads=threads)


def run_io(
    path: Path | None = None,
    *,
    sizes: Sequence[int] = SIZES,
    nbytes: int = TOTAL_BYTES,
    rounds: int = 7,
    threads: int = 2,
    fio_run_ms: int = RUN_MS,
) -> Result:
    """Measure in `path` (None: below `out/`): `nbytes` at a time, in buffers of each size.

    Raises:
        CannotMeasure: the folder is in RAM or has no direct I/O, fio fails, or a read returns wrong bytes.
    """
    directory = scratch_directory((path,) if path is not None else None)
    kind = file_system(directory)
    if kind in _RAM_FILE_SYSTEMS:
        raise CannotMeasure(f"{str(directory)!r} is on {kind}, in RAM; name a folder on a disk with --path")
    nbytes = -(-nbytes // (max(sizes) * threads)) * max(sizes) * threads  # whole buffers for every thread
    found: dict[int, dict[str, Series]] = {size: {} for size in sizes}
    for size, series in found.items():
        # Each part has its own memory and files: their location makes a tenth, which more rounds do not average out.
        for part in parts(rounds):
            measure(series, directory, size, nbytes, threads=threads, rounds=part, fio_run_ms=fio_run_ms, tell=_tell)
    bars = make_bars(found)
    tables = [_speed_table(found, nbytes, rounds), _cpu_table(found), bar_table(bars, note=_BARS_NOTE)]
    data = {
        "sizes": {str(size): {name: vars(one) for name, one in series.items()} for size, series in found.items()},
        "bars": [bar.data() for bar in bars],
        "nbytes": nbytes,
        "rounds": rounds,
        "threads": threads,
    }
    environment = environment_block({}, threads=threads) | {"file system": kind}
    if FIO in found[sizes[0]]:
        environment["fio"] = Fio(directory, nbytes, threads).version
    return Result(theme="io", tables=tables, data=data, environment=environment)


def parts(rounds: int) -> list[int]:
    """Divide the rounds into up to `_SESSIONS` parts."""
    return [part for part in (rounds // _SESSIONS + (index < rounds % _SESSIONS) for index in range(_SESSIONS)) if part]


def file_system(directory: Path) -> str:
    """The type of the file system that holds a directory, or ""."""
    resolved = directory.resolve()
    mounts = [
        (len(Path(part.mountpoint).parts), part.fstype)
        for part in psutil.disk_partitions(all=True)
        if resolved.is_relative_to(part.mountpoint)
    ]
    return max(mounts, default=(0, ""))[1]


def make_bars(found: Mapping[int, Mapping[str, Series]]) -> list[Bar]:
    """Compare the store with fio, and two paths on one disk with one; limit CPU time and the cost of submitting."""
    bars: list[Bar] = []
    for size, series in found.items():
        for mode in MODES if FIO in series else ():
            shares = ratios_of(series[STORE], series[FIO], mode)
            what = f"{mode}, {size // MIB} MiB: store / fio"
            bars.append(Bar(what=what, measured=median(shares), limit=_SHARE_BAR, sign=">=", spread=spread(shares)))
    for mode in MODES:
        # The rounds of all sizes together show what those of one size cannot.
        every: list[float] = []
        for size, series in found.items():
            shares = ratios_of(series[TWO_PATHS], series[STORE], mode)
            what = f"{mode}, {size // MIB} MiB: two paths on this disk / one"
            bars.append(Bar(what=what, measured=median(shares), limit=None, spread=spread(shares)))
            every += shares
        what, noise = f"{mode}, all sizes: two paths on this disk / one", doubt(every)
        bars.append(Bar(what=what, measured=median(every), limit=_STRIPES_BAR, sign=">=", spread=noise, noise=noise))
    for mode, limit in _CPU_BARS.items():
        for size, series in found.items():
            what = f"CPU seconds per GiB, {mode}, {size // MIB} MiB"
            bars.append(Bar(what=what, measured=median(series[STORE].cpu_s_per_gib[mode]), limit=limit, unit=" s"))
    smallest = found[min(found)][STORE]  # with the most transfers per gigabyte
    what = f"submitting a transfer, {min(found) // MIB} MiB"
    bars.append(Bar(what=f"{what}, CPU", measured=median(smallest.submit_cpu_s) * 1e6, limit=_SUBMIT_BAR_US, unit="us"))
    bars.append(Bar(what=f"{what}, wall", measured=median(smallest.submit_wall_s) * 1e6, limit=None, unit="us"))
    return bars


def ratios_of(one: Series, other: Series, mode: Mode) -> list[float]:
    """The bandwidth of one arm over that of the other, round by round."""
    return ratios(one.bytes_per_s[mode], other.bytes_per_s[mode])


def _tell(text: str) -> None:
    """Print a line; the thread of a progress bar would add its CPU time."""
    print(f"io: {text}", file=sys.stderr, flush=True)


def _table(
    title: str, found: Mapping[int, Mapping[str, Series]], modes: Iterable[Mode], figure: str, note: str
) -> Grid:
    """Make the table of a figure: a row for each mode and size, a column for each arm, the store's first."""
    names = sorted(next(iter(found.values())), key=lambda name: name != STORE)
    scale, digits = (1e9, 2) if figure == "bytes_per_s" else (1, 3)
    rows = [
        (
            f"{mode}, {size // MIB} MiB",
            *(f"{median(getattr(series[name], figure)[mode]) / scale:.{digits}f}" for name in names),
        )
        for size, series in found.items()
        for mode in modes
    ]
    return Grid(title, ("what", *names), rows, note)


def _speed_table(found: Mapping[int, Mapping[str, Series]], nbytes: int, rounds: int) -> Grid:
    note = (
        f"GB/s (10^9), medians over {rounds} rounds of {nbytes // MIB} MiB; each third has its own memory and files. "
        "Both: both directions together, while both are in flight. Store: PosixStore. Two paths: a StripedStore of "
        "two, each with its own workers. fio: psync, direct, one job per worker, for 0.8 s (blocks above 16 MiB: "
        "0.05 s per MiB) after a ramp of 0.1 s. In the other arms, one untimed pass over all buffers precedes each "
        "timed one. Timed reads use as many buffers as are in flight at once, as fio's do; outside the timed region, "
        "everything is read into separate memory and verified, before the timed reads and after the writes."
    )
    if FIO not in next(iter(found.values())):
        note += " fio: not installed (Debian and Ubuntu: apt-get install fio)."
    return _table("Bandwidth", found, MODES, "bytes_per_s", note)


def _cpu_table(found: Mapping[int, Mapping[str, Series]]) -> Grid:
    note = "CPU seconds of all threads per GiB moved, user and system, medians."
    return _table("CPU seconds per GiB", found, _CPU_BARS, "cpu_s_per_gib", note)
