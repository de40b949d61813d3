"""The io benchmark: the stores against the bare disk: bandwidth, CPU seconds and the cost of submitting.

Cold (direct I/O, so that no cache answers) and verified: every byte read is compared, outside of the clock. The arms
take turns in an order drawn by lot for each round, and are compared by medians of ratios within a round.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import psutil

from ._io.fio import Fio, Mode
from ._io.rounds import BARE, FIO, MODES, MORE_WORKERS, STORE, TWO_PATHS, Series, known, measure
from ._report.bar import Bar
from ._report.environment import environment_block
from ._report.ratios import doubt, ratios, spread
from ._report.results import CannotMeasure, Grid, Result
from ._workload.tools import scratch_directory

MIB = 1 << 20
SIZES = (4 * MIB, 16 * MIB, 64 * MIB)
TOTAL_BYTES = 512 * MIB  # of an arm's turn: some tenths of a second at the speed of an NVMe drive
_SESSIONS = 3
_SHARE_BAR, _STRIPES_BAR, _SUBMIT_BAR_US = 0.90, 1.0, 30.0
_CPU_BARS: dict[Mode, float] = {"write": 0.04, "read": 0.05}
_RAM_FILE_SYSTEMS = frozenset({"tmpfs", "ramfs", "devtmpfs"})


@dataclass(frozen=True, kw_only=True)
class Floor(Bar):
    """A bar the other way round: at least `limit`. `noise` is forgiven: what a difference has to exceed to count."""

    noise: float = 0.0

    @property
    def met(self) -> bool | None:
        return None if self.limit is None else self.measured + self.noise >= self.limit

    def row(self) -> tuple[str, str, str, str]:
        what, _, measured, met = super().row()
        limit = "-" if self.limit is None else f">= {self._text(self.limit)}"
        return what, limit, measured, met


def run_io(
    path: Path | None = None,
    *,
    sizes: Sequence[int] = SIZES,
    nbytes: int = TOTAL_BYTES,
    rounds: int = 7,
    threads: int = 2,
) -> Result:
    """Measure in `path` (None: below `out/`): `nbytes` at a time, in buffers of each of `sizes`.

    Raises:
        CannotMeasure: the folder is in RAM or has no direct I/O, fio fails, or what is read is not what was written.
    """
    directory = scratch_directory((path,) if path is not None else None)
    kind = file_system(directory)
    if kind in _RAM_FILE_SYSTEMS:
        raise CannotMeasure(f"{str(directory)!r} is on {kind}, in RAM; name a folder on a disk with --path")
    nbytes = -(-nbytes // (max(sizes) * threads)) * max(sizes) * threads  # whole buffers for every thread
    found: dict[int, dict[str, Series]] = {}
    missing: dict[str, str] = {}
    for size in sizes:
        found[size] = {}
        # Each time with other memory and other files: where those lie makes a tenth, which more rounds do not even out.
        for part in parts(rounds):
            series, missing = measure(directory, size, nbytes, threads=threads, rounds=part, tell=_tell)
            for name, one in series.items():
                found[size].setdefault(name, Series()).extend(one)
    bars = make_bars(found)
    tables = [_speed_table(found, missing, nbytes, rounds), _cpu_table(found), _bar_table(bars)]
    data = {
        "sizes": {str(size): {name: vars(one) for name, one in series.items()} for size, series in found.items()},
        "bars": [{**vars(bar), "met": bar.met} for bar in bars],
        "missing": missing,
        "nbytes": nbytes,
        "rounds": rounds,
        "threads": threads,
    }
    environment = environment_block({}, threads=threads) | {"file system": kind}
    if FIO not in missing:
        environment["fio"] = Fio(directory, nbytes, threads).version
    return Result(theme="io", tables=tables, data=data, environment=environment)


def parts(rounds: int) -> list[int]:
    """Rounds in up to `_SESSIONS` parts."""
    return [part for part in (rounds // _SESSIONS + (index < rounds % _SESSIONS) for index in range(_SESSIONS)) if part]


def file_system(directory: Path) -> str:
    """The type of the file system that holds a directory; "" where that is not known."""
    resolved = directory.resolve()
    mounts = [
        (len(Path(part.mountpoint).parts), part.fstype)
        for part in psutil.disk_partitions(all=True)
        if resolved.is_relative_to(part.mountpoint)
    ]
    return max(mounts, default=(0, ""))[1]


def make_bars(found: Mapping[int, Mapping[str, Series]]) -> list[Bar]:
    """What the measurements must reach. Without fio the store's share of the bare calls is shown, without a bar."""
    bars: list[Bar] = []
    for size, series in found.items():
        store, other = series[STORE], FIO if FIO in series else BARE
        for mode in MODES:
            shares = ratios_of(store, series[other], mode)
            what = f"{mode}, {size // MIB} MiB: store / {other}"
            limit = _SHARE_BAR if other == FIO else None
            bars.append(Floor(what=what, measured=median(shares), limit=limit, spread=spread(shares)))
    bars += _stripes_bars(found)
    for mode, limit in _CPU_BARS.items():
        for size, series in found.items():
            what = f"CPU seconds per GiB, {mode}, {size // MIB} MiB"
            bars.append(Bar(what=what, measured=median(series[STORE].cpu_s_per_gib[mode]), limit=limit, unit=" s"))
    smallest = found[min(found)][STORE]  # with the most transfers to the gigabyte
    what = f"submitting a transfer, {min(found) // MIB} MiB"
    bars.append(Bar(what=f"{what}, CPU", measured=median(smallest.submit_cpu_s) * 1e6, limit=_SUBMIT_BAR_US, unit="us"))
    bars.append(Bar(what=f"{what}, wall", measured=median(smallest.submit_wall_s) * 1e6, limit=None, unit="us"))
    return bars


def _stripes_bars(found: Mapping[int, Mapping[str, Series]]) -> list[Bar]:
    """Two paths on one disk against one path, in each mode; the bar is over all sizes, whose rounds together tell
    what no size's own do."""
    bars: list[Bar] = []
    for other, called in ((STORE, "one"), (MORE_WORKERS, "one with as many workers")):
        for mode in MODES:
            every: list[float] = []
            for size, series in found.items():
                shares = ratios_of(series[TWO_PATHS], series[other], mode)
                what = f"{mode}, {size // MIB} MiB: two paths on this disk / {called}"
                bars.append(Floor(what=what, measured=median(shares), limit=None, spread=spread(shares)))
                every += shares
            what = f"{mode}, all sizes: two paths on this disk / {called}"
            limit, noise = _STRIPES_BAR if other == STORE else None, doubt(every)
            bars.append(Floor(what=what, measured=median(every), limit=limit, spread=noise, noise=noise))
    return bars


def ratios_of(one: Series, other: Series, mode: Mode) -> list[float]:
    """Bandwidth of one arm over the other's, round by round."""
    return ratios(one.bytes_per_s[mode], other.bytes_per_s[mode])


def _tell(text: str) -> None:
    """A line, and no progress bar: that has a thread of its own, whose CPU time would count."""
    print(f"io: {text}", file=sys.stderr, flush=True)


def _speed_table(
    found: Mapping[int, Mapping[str, Series]], missing: Mapping[str, str], nbytes: int, rounds: int
) -> Grid:
    names = known(found)
    columns = [*names, *missing]
    rows = []
    for size, series in found.items():
        for mode in MODES:
            cells = [_speed(series[name], mode) if name in series else "" for name in columns]
            rows.append((f"{mode}, {size // MIB} MiB", *cells))
    note = (
        f"GB/s (10^9), medians over {rounds} rounds of {nbytes // MIB} MiB, a third of them each with memory and "
        "files of their own; both: of both directions together, while both are under way. Store: PosixStore. Bare: "
        "os.pwrite and os.preadv on threads, the same memory. Two paths: a StripedStore of two, each with workers of "
        "its own; as many workers: a PosixStore with as many as those have together. fio: psync, direct, as many "
        "jobs as workers, for 0.8 s (blocks above 16 MiB: 0.05 s for each MiB) after 0.1 s that do not count; of the "
        "others, one pass over all buffers does not count before each that does. Reads that count go into as few "
        "buffers in turn as are under way at once, as fio's do (DeepSpeed's into its own); what those hold in the end "
        "was verified, and, not counted, all that was written."
    )
    note += "".join(f" {name}: not measured ({reason})." for name, reason in missing.items())
    return Grid("Bandwidth", ("what", *columns), rows, note)


def _speed(series: Series, mode: Mode) -> str:
    return f"{median(series.bytes_per_s[mode]) / 1e9:.2f}" if mode in series.bytes_per_s else "-"


def _cpu_table(found: Mapping[int, Mapping[str, Series]]) -> Grid:
    names = known(found)
    rows: list[tuple[Any, ...]] = []
    for size, series in found.items():
        for mode in _CPU_BARS:
            cells = [f"{median(series[name].cpu_s_per_gib[mode]):.3f}" if name in series else "" for name in names]
            rows.append((f"{mode}, {size // MIB} MiB", *cells))
    note = "CPU seconds of all threads per GiB moved, user and system, medians."
    return Grid("CPU seconds per GiB", ("what", *names), rows, note)


def _bar_table(bars: Sequence[Bar]) -> Grid:
    note = (
        "Shares: medians of the ratios of bandwidth within a round ± half the interquartile range; over all sizes ± "
        "half the notch of a box plot, about 95 % confidence: two paths count as no slower where 1 is within that. "
        "Each path has workers of its own, so two have twice as many as one."
    )
    return Grid("Bars", ("what", "bar", "measured", "met"), [bar.row() for bar in bars], note)
