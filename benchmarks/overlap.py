"""The overlap benchmark: the share of a step's I/O that is hidden, the link it needs, and the report of each link."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from ._processes.arms import Spec, in_turns, running
from ._report.environment import environment_block
from ._report.progress import progress
from ._report.ratios import median_ratio
from ._report.results import Grid, Result, mib
from ._workload.sizes import Model

_WARM_UP_ROUNDS = 2
_TRANSFERS = ("write", "read")


def run_overlap(model: Model, *, rates: Sequence[float], rounds: int, threads: int, out: Path) -> Result:
    """Trace `rounds` steps at each rate beside plain ones; without a rate, at the device's own."""
    out.mkdir(parents=True, exist_ok=True)
    specs, files = {"plain": _arm("plain", model, threads)}, []
    for rate in [None, *rates]:
        name = link_name(rate)
        files.append(out / ("overlap.html" if rate is None else f"overlap_{rate / 1e6:.0f}MBps.html"))
        page = str(files[-1].absolute())
        specs[name] = _arm(name, model, threads, tier="nvme", rate_bytes_per_s=rate, page=page)
    answers: dict[str, list[dict[str, Any]]] = {name: [] for name in specs}
    total = _WARM_UP_ROUNDS + rounds
    with progress(f"overlap {model.name}", total * len(specs)) as bar, running(list(specs.values())) as arms:
        for arm, number, answer in in_turns(arms, range(total)):
            if number >= _WARM_UP_ROUNDS:
                answers[arm.spec.name].append(answer)
            bar.advance(f"{arm.spec.name}: {answer['wall_s']:.2f} s")
        allocators = {arm.spec.name: arm.allocator for arm in arms}
        for arm in arms:
            arm.close()
    found = {name: summarise(steps, answers["plain"]) for name, steps in answers.items()}
    free = found[link_name(None)]
    need = needed_rate(free)
    data = {
        "model": model.options(),
        "links": {
            name: {"rate_bytes_per_s": specs[name].options.get("rate_bytes_per_s"), **row}
            for name, row in found.items()
        },
        "needed_bytes_per_s": need,
        "hidden_share": free["hidden_share"],
        "gradients_bit_equal": len({tuple(s["gradients_sha256"] for s in steps) for steps in answers.values()}) == 1,
    }
    environment = environment_block(allocators, threads=threads)
    return Result(theme="overlap", tables=[_table(model, found, need)], data=data, files=files, environment=environment)


def link_name(rate: float | None) -> str:
    """Name of a link in tables and legends."""
    return "offload" if rate is None else f"offload, {rate / 1e6:,.0f} MB/s"


def summarise(steps: Sequence[Mapping[str, Any]], plain: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Compute medians over the traced steps of one arm."""

    def middle(value: Callable[[Mapping[str, Any]], float]) -> float:
        return median(value(step) for step in steps)

    def moved(*counters: str) -> float:
        return middle(lambda step: sum(step["moved"].get(counter, 0) for counter in counters))

    busy = middle(lambda step: busy_s((start, end) for kind, start, end in step["events"] if kind in _TRANSFERS))
    return {
        "wall_s": middle(lambda step: step["wall_s"]),
        "wall_ratio": median_ratio([step["wall_s"] for step in steps], [step["wall_s"] for step in plain]),
        "forward_s": middle(lambda step: step["forward_s"]),
        "backward_s": middle(lambda step: step["backward_s"]),
        "peak_bytes": max(step["peak_bytes"] for step in steps),
        "written_bytes": moved("written_bytes"),
        "read_bytes": moved("read_bytes"),
        "forwarded_bytes": moved("forwarded_bytes"),
        "backward_waited_s": moved("wait_s"),
        "forward_waited_s": moved("backpressure_s"),
        "io_busy_s": busy,
        "hidden_share": hidden_share(busy, moved("wait_s", "backpressure_s")),
    }


def busy_s(transfers: Iterable[tuple[float, float]]) -> float:
    """Count the seconds in which at least one of the transfers, from start to end, was under way."""
    total, until = 0.0, float("-inf")
    for start, end in sorted(transfers):
        total += max(0.0, end - max(start, until))
        until = max(until, end)
    return total


def hidden_share(io_busy_s: float, waited_s: float) -> float:
    """Share of I/O time hidden behind compute: 1 where nothing waited."""
    return max(0.0, 1.0 - waited_s / io_busy_s) if io_busy_s > 0.0 else 1.0


def needed_rate(row: Mapping[str, Any]) -> float:
    """Bytes per second each way below which I/O cannot fit behind this compute, whatever the order."""
    return max(row["written_bytes"] / row["forward_s"], row["read_bytes"] / row["backward_s"])


def _arm(name: str, model: Model, threads: int, **options: Any) -> Spec:
    merged = {**model.options(), **options}
    return Spec(name=name, role="timeline:TimelineArm", options=merged, allocator="auto", threads=threads)


def _table(model: Model, found: Mapping[str, Mapping[str, Any]], need: float) -> Grid:
    rows = [
        (
            name,
            f"{row['wall_s']:.3f}",
            f"{row['wall_ratio']:.2f}",
            mib(row["peak_bytes"]),
            mib(row["written_bytes"]),
            mib(row["read_bytes"]),
            f"{row['io_busy_s']:.3f}",
            f"{row['forward_waited_s']:.3f}",
            f"{row['backward_waited_s']:.3f}",
            f"{row['hidden_share']:.1%}" if row["io_busy_s"] else "-",
        )
        for name, row in found.items()
    ]
    columns: tuple[str, ...] = ("link", "step s", "/ plain", "peak MiB", "written MiB", "read MiB", "I/O busy s")
    columns += ("forward waited s", "backward waited s", "hidden")
    note = (
        "Hidden: 1 - waited / I/O busy time. I/O fits behind this compute on a link of "
        f"{need / 1e6:,.0f} MB/s each way: the bytes written over the forward's time, those read over the backward's."
    )
    return Grid(f"Overlap, {model.describe()}", columns, rows, note)
