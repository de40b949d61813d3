"""The forecast benchmark: what `tba plan` forecasts beside steps that were run, here and by others on GPUs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from ._processes.arms import Spec
from ._processes.measure import measure
from ._report.environment import environment_block
from ._report.progress import progress
from ._report.results import CannotMeasure, Grid, Result, mib
from ._workload.published import RUNS, SOURCE

_ROOT = Path(__file__).resolve().parents[1]
# Way of a forecast, and whether the arm that is run checkpoints.
_WAYS = {"all kept": False, "full checkpointing": True}
_STEPS, _WARM_UP = 2, 1


def run_forecast(families: Sequence[str], *, rounds: int, threads: int, published: bool = True) -> Result:
    """Forecast and run every family in `rounds` rounds; forecast what others have published."""
    forecasts: dict[str, list[dict[str, Any]]] = {family: [] for family in families}
    walls: dict[str, list[float]] = {_arm(family, way): [] for family in families for way in _WAYS}
    computed: dict[str, list[float]] = {name: [] for name in walls}
    ratios: dict[str, list[float]] = {name: [] for name in walls}
    peaks: dict[str, int] = {}
    allocators: dict[str, str] = {}
    for _ in range(rounds):
        with progress("forecasts", len(families)) as bar:
            for family in families:
                forecasts[family].append(_forecast_here(family, threads))
                bar.advance(family)
        arms = measure(_specs(families, threads), rounds=_STEPS, title="steps", warm_up=_WARM_UP)
        for family in families:
            for way in _WAYS:
                name = _arm(family, way)
                walls[name].append(median(arms[name].wall_s))
                computed[name].append(median(arms[name].cpu_s) / threads)
                ratios[name].append(computed[name][-1] / forecasts[family][-1]["steps"][way]["step_s"])
                peaks[name] = max(peaks.get(name, 0), arms[name].peak_bytes)
                allocators[name] = arms[name].allocator
    others = _compare_published() if published else []
    tables = [_steps_table(families, forecasts, walls, computed, ratios), _memory_table(families, forecasts, peaks)]
    data = {
        "forecasts": forecasts,
        "wall_s": walls,
        "cpu_s_by_thread": computed,
        "measured_by_forecast": ratios,
        "peak_bytes": peaks,
    }
    if others:
        tables.append(_published_table(others))
    environment = environment_block(allocators, threads=threads)
    return Result(theme="forecast", tables=tables, data={**data, "published": others}, environment=environment)


def _arm(family: str, way: str) -> str:
    return f"{family}, {way}"


def _specs(families: Sequence[str], threads: int) -> list[Spec]:
    return [
        Spec(
            name=_arm(family, way),
            role="family:FamilyArm",
            options={"family": family, "checkpoint": checkpoint},
            allocator="auto",
            threads=threads,
        )
        for family in families
        for way, checkpoint in _WAYS.items()
    ]


def _forecast_here(family: str, threads: int) -> dict[str, Any]:
    name = f"benchmarks._workload.subjects:{family}"
    return _plan([name, "--device", "here", "--disk", "none", "--optimizer", "sgd"], threads)


def _plan(arguments: Sequence[str], threads: int) -> dict[str, Any]:
    """Run `tba plan`, under the allocator that the arms get."""
    command = [sys.executable, "-m", "tba", "run", "--", sys.executable, "-m", "tba", "plan", *arguments, "--json"]
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads)}
    done = subprocess.run(command, cwd=_ROOT, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise CannotMeasure(f"tba plan {' '.join(arguments)} ended with status {done.returncode}:\n{done.stderr}")
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def _compare_published() -> list[dict[str, Any]]:
    found = []
    with progress("published", sum(len(run.tokens_per_s) for run in RUNS)) as bar:
        for run in RUNS:
            for device, tokens_per_s in run.tokens_per_s.items():
                step_s = _plan([*run.arguments(), "--device", device], 1)["steps"]["all kept"]["step_s"]
                forecast = run.batch * run.sequence / step_s
                found.append(
                    {
                        "model": run.name,
                        "device": device,
                        "sequence": run.sequence,
                        "batch": run.batch,
                        "published_tokens_per_s": tokens_per_s,
                        "forecast_tokens_per_s": forecast,
                        "measured_by_forecast": forecast / tokens_per_s,
                    }
                )
                bar.advance(f"{run.name} {device}")
    return found


def _steps_table(families: Sequence[str], forecasts: Any, walls: Any, computed: Any, ratios: Any) -> Grid:
    rows = []
    for family in families:
        for way in _WAYS:
            name = _arm(family, way)
            forecast_s = median(each["steps"][way]["step_s"] for each in forecasts[family])
            ratio = ratios[name]
            rows.append(
                (
                    name,
                    f"{forecast_s:.3f}",
                    f"{median(computed[name]):.3f}",
                    f"{median(walls[name]):.3f}",
                    f"{median(ratio):.2f}",
                    f"{min(ratio):.2f} to {max(ratio):.2f}",
                )
            )
    everything = sorted(value for values in ratios.values() for value in values)
    note = (
        f"Medians of {len(everything) // len(rows)} rounds, in each of which every family is forecast (the machine is "
        "measured anew for each) and then run. The machine is shared, so what is compared is processor time: CPU "
        "seconds of a thread, in the forecast and in the step; wall stands beside it. Ratios are those of a round. "
        "Over all: "
        f"{everything[0]:.2f} to {everything[-1]:.2f}, median {median(everything):.2f}."
    )
    heads = ("arm", "forecast s", "CPU s", "wall s", "CPU / forecast", "least to most")
    return Grid("Steps here", heads, rows, note)


def _memory_table(families: Sequence[str], forecasts: Any, peaks: Any) -> Grid:
    rows = []
    for family in families:
        memory, saved = forecasts[family][0]["memory_bytes"], forecasts[family][0]["saved_bytes"]["all"]
        forecast_bytes = memory["peak_all_kept"] - memory["weights"]
        peak_bytes = peaks[_arm(family, "all kept")]
        rows.append((family, mib(saved), mib(forecast_bytes), mib(peak_bytes), f"{peak_bytes / forecast_bytes:.2f}"))
    note = (
        "Peak: saved tensors, gradients and what operators work on; measured: resident, over idle, under jemalloc. "
        "That saved bytes are those the engine counts, to the byte, is tested (tests/forecast)."
    )
    heads = ("family", "saves MiB", "peak, forecast MiB", "peak, measured MiB", "measured / forecast")
    return Grid("Memory here", heads, rows, note)


def _published_table(others: Sequence[dict[str, Any]]) -> Grid:
    rows = [
        (
            each["device"],
            each["model"],
            str(each["sequence"]),
            str(each["batch"]),
            f"{each['forecast_tokens_per_s']:,.0f}",
            f"{each['published_tokens_per_s']:,.0f}",
            f"{each['measured_by_forecast']:.2f}",
        )
        for each in sorted(others, key=lambda each: str(each["device"]))
    ]
    spread = sorted(each["measured_by_forecast"] for each in others)
    note = (
        f"{SOURCE}. The shares of a card's peaks that forecasts count with were fitted to these runs, so only the "
        f"spread is news: {spread[0]:.2f} to {spread[-1]:.2f} of the forecast time, median {median(spread):.2f}. "
        "What GPUs send one another is in the published times alone."
    )
    heads = ("device", "model", "sequence", "batch", "forecast tokens/s", "published", "time, published / forecast")
    return Grid("Published steps on GPUs", heads, rows, note)
