"""The overlap benchmark: the share of a step's I/O that is hidden, the link it needs, and the report of each link."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from statistics import median
from typing import Annotated, Any, Literal

import typer

from ._processes.device import CPU
from ._processes.measure import run_rounds
from ._report.environment import environment_block
from ._report.options import OUT, Out, Quick, Threads, parse_rate
from ._report.ratios import median_ratio
from ._report.results import Column, Grid, Result, mib
from ._workload.sizes import CPU_MODELS, TINY

_TRANSFERS = ("write", "read")
_FREE = "offload"  # at the device's own rate


def overlap(
    model: Annotated[Literal["24x256", "8x512"], typer.Option(help="Size of the GPT.")] = "24x256",
    rate: Annotated[
        list[str] | None, typer.Option(help="Limit the link to this rate, such as 200MB (a second).")
    ] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Steps traced; the report shows the last.")] = 3,
    threads: Threads = 2,
    out: Out = OUT,
    quick: Quick = False,
) -> Result:
    """The share of a step's I/O that compute hides; with --rate (may be repeated) on slower links."""
    out.mkdir(parents=True, exist_ok=True)
    size, rounds = (TINY, 1) if quick else (CPU_MODELS[model], rounds)
    common = {"threads": threads, "allocator": CPU.allocator, "role": "timeline:TimelineArm"}
    rates: dict[str, float | None] = {"plain": None, _FREE: None}
    rates |= {f"{_FREE}, {limit / 1e6:,.0f} MB/s": limit for limit in map(parse_rate, rate or [])}
    specs, files = {"plain": CPU.gpt("plain", size, **common)}, []
    for name, limit in list(rates.items())[1:]:
        files.append(out / ("overlap.html" if limit is None else f"overlap_{limit / 1e6:.0f}MBps.html"))
        settings = {**size.settings, "max_write_rate": limit, "max_read_rate": limit}
        page = str(files[-1].absolute())
        specs[name] = CPU.gpt(name, size, tier="nvme", settings=settings, page=page, **common)
    turns = list(run_rounds(list(specs.values()), rounds=rounds, title=f"overlap {size.name}"))
    answers = {name: [answer for arm, _, answer, timed in turns if timed and arm.spec.name == name] for name in specs}
    found = {name: summarise(steps, answers["plain"]) for name, steps in answers.items()}
    need = needed_rate(found[_FREE])
    data = {
        "model": size.options(),
        "links": {name: {"rate_bytes_per_s": rates[name], **row} for name, row in found.items()},
        "needed_bytes_per_s": need,
        "hidden_share": found[_FREE]["hidden_share"],
        "gradients_bit_equal": len({tuple(s["gradients_sha256"] for s in steps) for steps in answers.values()}) == 1,
    }
    table = _table(f"Overlap, {size.describe()}", found, need)
    environment = environment_block({arm.spec.name: arm for arm, *_ in turns}, threads=threads)
    return Result(theme="overlap", tables=[table], data=data, files=files, environment=environment)


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
    """Count the seconds in which at least one of the transfers, from start to end, was in flight."""
    total, until = 0.0, float("-inf")
    for start, end in sorted(transfers):
        total += max(0.0, end - max(start, until))
        until = max(until, end)
    return total


def hidden_share(io_busy_s: float, waited_s: float) -> float:
    """Share of I/O time hidden behind compute: 1 if nothing waited."""
    return max(0.0, 1.0 - waited_s / io_busy_s) if io_busy_s > 0.0 else 1.0


def needed_rate(row: Mapping[str, Any]) -> float:
    """Bytes per second each way below which I/O cannot fit behind this compute, in any order."""
    return max(row["written_bytes"] / row["forward_s"], row["read_bytes"] / row["backward_s"])


def _table(title: str, found: Mapping[str, Mapping[str, Any]], need: float) -> Grid:
    def amount(key: str, show: Callable[[float], str] = "{:.3f}".format) -> Callable[[str], str]:
        return lambda name: show(found[name][key])

    columns: list[Column] = [
        ("link", str),
        ("step s", amount("wall_s")),
        ("/ plain", amount("wall_ratio", "{:.2f}".format)),
        ("peak MiB", amount("peak_bytes", mib)),
        ("written MiB", amount("written_bytes", mib)),
        ("read MiB", amount("read_bytes", mib)),
        ("I/O busy s", amount("io_busy_s")),
        ("forward waited s", amount("forward_waited_s")),
        ("backward waited s", amount("backward_waited_s")),
        ("hidden", lambda name: f"{found[name]['hidden_share']:.1%}" if found[name]["io_busy_s"] else "-"),
    ]
    note = (
        "Hidden: 1 - waited / I/O busy time. I/O fits behind this compute on a link of "
        f"{need / 1e6:,.0f} MB/s each way: the bytes written over the forward's time, those read over the backward's."
    )
    return Grid.of(title, found, columns, note)
