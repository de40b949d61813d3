"""The ranks benchmark: what a budget costs a training over several ranks on a slow link, beside checkpointing."""

from __future__ import annotations

import tempfile
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from importlib.util import find_spec
from math import prod
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import typer

from ._processes.arms import Spec
from ._processes.measure import measure
from ._report.bar import Bar, bar_table
from ._report.curve import faster_bar
from ._report.environment import environment_block
from ._report.options import Folder, Quick, Threads, check_names, parse_rate
from ._report.results import Column, Grid, Result, mib
from ._report.steps import Measured, arm_table, equal_text
from ._workload.llama import LlamaSizes
from ._workload.tools import scratch_directory

PLAIN, CHECKPOINT = "plain", "checkpoint"
_WARM_UP = 21  # steps that are watched, agreed on, timed (and perhaps those by another choice of blocks), and followed
_NO_SLOWER = 0.98  # of the throughput of checkpointing
_SIZES = LlamaSizes(layers=8, width=256, heads=4, hidden=704, sequence=256, vocabulary=256)
_TINY = LlamaSizes(layers=4, width=32, heads=4, hidden=64, sequence=16, vocabulary=64)
# DeepSpeed writes no parameter to a file of which a rank has less than 1 MiB: here those of the feed-forward, in the
# quick run the embedding and the head.
_WIDE = LlamaSizes(layers=4, width=512, heads=8, hidden=2048, sequence=128, vocabulary=256)
_TINY_WIDE = LlamaSizes(layers=4, width=64, heads=4, hidden=64, sequence=16, vocabulary=1 << 14)
_BUDGETS = (0.25, 0.5, 0.75)  # of what a rank saves


@dataclass(frozen=True)
class Way:
    """One way to spread the model: a function of `_workload.parallel` ("": stages), and the ranks by dimension.

    Attributes:
        needs: a package that this project does not install.
        files: whether DeepSpeed has files of its own.
        sizes, tiny: of the model, and with `--quick`.
    """

    wrap: str
    mesh: tuple[int, ...] = (2,)
    dimensions: tuple[str, ...] = ("data",)
    needs: str = ""
    files: bool = False
    sizes: LlamaSizes = _SIZES
    tiny: LlamaSizes = _TINY

    @property
    def runs(self) -> bool:
        """Whether this machine has what it needs."""
        return not self.lacks

    @property
    def lacks(self) -> str:
        """Say what of its needs this machine lacks; "" if nothing."""
        if self.needs and find_spec(self.needs) is None:
            return f"{self.needs} is not installed: pip install {self.needs}"
        if self.files:
            from ._workload.async_io import lacking_for_files

            return lacking_for_files()
        return ""


@dataclass(frozen=True, kw_only=True)
class Run:
    """What is trained on each rank, and how often.

    Attributes:
        batch: examples of a step.
        rates: bytes per second of each rank's link, each way; the last one of all others.
        rounds: timed steps of each arm.
        threads: of each rank.
        settings: fields of `OffloadConfig`.
    """

    batch: int
    rates: Sequence[float]
    rounds: int
    threads: int
    settings: Mapping[str, Any]

    def links(self, ranks: int) -> list[dict[str, float]]:
        """Return each rank's own settings."""
        rates = [self.rates[min(rank, len(self.rates) - 1)] for rank in range(ranks)]
        return [{"max_write_rate": rate, "max_read_rate": rate} for rate in rates]


WAYS: Mapping[str, Way] = {
    "fsdp1": Way("fsdp1"),
    "fsdp2": Way("blocks_sharded"),
    "fsdp2-parts": Way("parts_sharded"),
    "tp": Way("tensor_parallel"),
    "tp-sp": Way("sequence_parallel"),
    "tp-fsdp2": Way("tensor_parallel_sharded", (2, 2), ("data", "tensor")),
    "pp-fsdp2": Way("", (2, 2), ("stage", "data")),
    "zero3": Way("zero3", needs="deepspeed"),
    "zero3-nvme": Way("zero3-nvme", needs="deepspeed", files=True, sizes=_WIDE, tiny=_TINY_WIDE),
}


def ranks(
    way: Annotated[list[str] | None, typer.Option(help=f"{', '.join(WAYS)} (default: all that run here).")] = None,
    rate: Annotated[list[str] | None, typer.Option(help="Limit of each rank's link, the last for all others.")] = None,
    batch: Annotated[int, typer.Option(min=1, help="Examples of a step.")] = 4,
    rounds: Annotated[int, typer.Option(min=1, help="Timed rounds of each arm.")] = 8,
    threads: Threads = 1,
    path: Folder = None,
    quick: Quick = False,
) -> Result:
    """Steps over 2 or 4 ranks: plain, checkpointed, and by budget on a slow link (2 minutes a way)."""
    check_names(way or (), WAYS, "way")
    rates = [parse_rate(each) for each in rate or ["50MB/s"]]
    common = {"rates": rates, "threads": threads}
    run = Run(batch=batch, rounds=rounds, settings={}, **common)
    if quick:
        run = Run(batch=2, rounds=1, settings={"min_tensor_bytes": 0}, **common)
    chosen = {name: WAYS[name] for name in way or (list(WAYS)[1:2] if quick else WAYS) if way or WAYS[name].runs}
    for name, each in chosen.items():
        if lacks := each.lacks:
            raise typer.BadParameter(f"{name} does not run here: {lacks}")
    tables: list[Grid] = []
    bars: list[Bar] = []
    data: dict[str, Any] = {}
    every: dict[str, Measured] = {}
    for name, each in chosen.items():
        sizes = each.tiny if quick else each.sizes
        parent = scratch_directory((path,) if path is not None else None)
        with tempfile.TemporaryDirectory(prefix="tba-ranks-", dir=parent) as folder:
            found, saved_bytes = _measure(each, sizes, Path(folder), run)
        tables.append(_table(name, sizes, found, saved_bytes))
        own = _bars(name, found)
        bars += own
        every |= found
        data[name] = {
            "sizes": asdict(sizes),
            "saved_bytes": saved_bytes,
            "arms": {arm.name: vars(arm) for arm in found.values()},
            "bars": [bar.data() for bar in own],
        }
    limits = ", ".join(f"{each / 1e6:,.0f} MB/s" for each in rates)
    about = f"Batch {run.batch}; links: {limits}. "
    return Result(
        theme="-".join(["ranks", *(way or ())]),
        tables=[bar_table(bars, "Bars", about + "Behind ±: about 95 % confidence."), *tables],
        data={"ways": data, "rates_bytes_per_s": rates, "batch": run.batch},
        environment=environment_block(every, threads=threads),
    )


def _measure(way: Way, sizes: LlamaSizes, folder: Path, run: Run) -> tuple[dict[str, Measured], int]:
    """Measure the arms of one way; return them, and the bytes that a rank saves."""

    def spec(name: str, **options: Any) -> Spec:
        own = folder / name
        own.mkdir()
        spread = {"wrap": way.wrap, "mesh": way.mesh, "dimensions": way.dimensions}
        trained = {**spread, "sizes": asdict(sizes), "batch": run.batch}
        return Spec(
            name=name, role="ranks:RanksArm", options={**trained, "folder": str(own), **options}, threads=run.threads
        )

    counted = measure([spec("keep", tier="keep", settings=run.settings)], rounds=1, warm_up=1, title="bytes")["keep"]
    saved_bytes = max(plan["worth_bytes"] for plan in counted.moved["plans"])  # type: ignore[attr-defined]
    specs = [spec(PLAIN), spec(CHECKPOINT, checkpoint=True)]
    for share in _BUDGETS:
        settings = {**run.settings, "memory_budget": int(share * saved_bytes)}
        specs.append(spec(f"auto {share:.2f}", tier="auto", settings=settings, own=run.links(prod(way.mesh))))
    return measure(specs, rounds=run.rounds, warm_up=_WARM_UP, title="ranks"), saved_bytes


def _bars(way: str, arms: Mapping[str, Measured]) -> list[Bar]:
    """Each budget holds, all ranks recompute alike, and none is slower than checkpointing whose peak is no lower."""
    bars = []
    for name, arm in arms.items():
        if not arm.moved:
            continue
        plans: list[dict[str, Any]] = arm.moved["plans"]  # type: ignore[assignment]
        held = max(plan["held_bytes"] / max(1, plan["budget_bytes"]) for plan in plans)
        bars += [
            Bar(what=f"{way}: {name}: held / budget, of the rank that holds most", measured=held, limit=1.0),
            Bar(what=f"{way}: {name}: choices of blocks under one plan", measured=_choices(plans), limit=1, unit=""),
            replace(faster_bar(way, arm, arms[CHECKPOINT]), limit=_NO_SLOWER),
        ]
    return bars


def _choices(plans: Sequence[Mapping[str, Any]]) -> int:
    """Count the choices of blocks that ranks with one plan have made. Stages of a pipeline have plans of their own."""
    found: defaultdict[str, set[tuple[int, ...]]] = defaultdict(set)
    for plan in plans:
        found[plan["agreed"]].add(tuple(plan["recomputed"]))
    return max(map(len, found.values()))


def _table(way: str, sizes: LlamaSizes, arms: Mapping[str, Measured], saved_bytes: int) -> Grid:
    def plan(arm: Measured, show: Any) -> str:
        return show(arm.moved["plans"]) if arm.moved else "-"

    note = f"Llama, {sizes.layers} x {sizes.width}, sequence {sizes.sequence}. Each rank saves {mib(saved_bytes)} MiB. "
    note += "Seconds: of the slowest rank; CPU seconds: of all. Peak: of the rank that needs most, over idle. "
    note += equal_text(list(arms.values()))
    if WAYS[way].needs == "deepspeed":
        note += " (Of weights after the step, in place of gradients.)"
    files = _FILES if WAYS[way].files else ()
    if files:
        note += " DeepSpeed's MiB: of all ranks, what their processes wrote and read less what tba did. It waited: for "
        note += "its own transfers. Optimizer: with the swapping of its state."
    told = [f"{name}: {_agreed(arm)}" for name, arm in arms.items() if arm.moved]
    return arm_table(
        way,
        arms,
        " ".join([note, *told]),
        (
            "blocks recomputed",
            lambda arm: plan(arm, lambda plans: f"{len(plans[0]['recomputed'])} of {plans[0]['blocks']}"),
        ),
        (
            "moves, by rank, MiB",
            lambda arm: plan(arm, lambda plans: ", ".join(mib(each["moved_bytes"]) for each in plans)),
        ),
        ("waited ms", lambda arm: plan(arm, lambda plans: f"{_waited_ms(arm):.0f}")),
        ("agreed ms: to the plan (last to come), a step", lambda arm: plan(arm, lambda plans: _agreed_ms(arm))),
        *files,
    )


def _of_figures(show: Callable[[float], str], *names: str) -> Callable[[Measured], str]:
    """Show medians of the figures with these names."""
    return lambda arm: ", ".join(show(median(arm.figures[name])) for name in names)


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:,.0f}"


_FILES: Sequence[Column] = (
    ("DeepSpeed wrote, read MiB", _of_figures(mib, "swapped_out_bytes", "swapped_in_bytes")),
    ("it waited ms", _of_figures(_ms, "swap_wait_s")),
    ("forward, backward, optimizer ms", _of_figures(_ms, "forward_s", "backward_s", "optimizer_s")),
)


def _agreed_ms(arm: Measured) -> str:
    """Milliseconds spent in meetings before the timed steps, and in one of those.

    Of the slowest rank; in parentheses, of the rank that spent least in each of these steps. It came last to most of
    their meetings, and waited for no other rank there: an upper bound of what meetings cost once all ranks have come.
    """
    spent, last = (_seconds(arm, name) for name in ("agreeing_s", "last_agreeing_s"))
    before, timed = spent[: -len(arm.wall_s)], spent[-len(arm.wall_s) :]
    return f"{1e3 * sum(before):.0f} ({1e3 * sum(last[: -len(arm.wall_s)]):.0f}), {1e3 * median(timed):.1f}"


def _seconds(arm: Measured, name: str) -> Sequence[float]:
    return arm.moved[name]  # type: ignore[return-value]  # arms tell what they like, each under a name of its own


def _waited_ms(arm: Measured) -> float:
    return 1e3 * median(arm.waited_share) * median(arm.wall_s)


def _agreed(arm: Measured) -> str:
    return str(arm.moved["plans"][0]["agreed"]) or "planned by each rank"  # type: ignore[index]
