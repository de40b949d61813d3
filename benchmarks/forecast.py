"""The forecast benchmark: forecasts of `tba plan` against steps that were run on this machine."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import typer

from ._processes.device import CPU
from ._processes.measure import measure
from ._report.environment import environment_block
from ._report.options import Quick, Threads, check_names
from ._report.progress import progress
from ._report.results import CannotMeasure, Column, Grid, Result, mib
from ._report.steps import Measured
from ._workload.families import FAMILIES

_ROOT = Path(__file__).resolve().parents[1]
# Ways of a forecast, and whether the arm that is run checkpoints.
_WAYS = {"all kept": False, "full checkpointing": True}
_POLICIES = {"all kept": "plain", "full checkpointing": "checkpointing"}  # as `tba plan` calls them
_STEPS, _WARM_UP = 2, 1
# Of an arm in each round: "forecast_s"; "cpu_s", those of one thread; "wall_s"; and "ratio", CPU / forecast.
_Rounds = dict[str, list[float]]


def forecast(
    family: Annotated[list[str] | None, typer.Option(help="gpt, bert, t5, llama, conv (default: all).")] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds; each forecasts and runs everything.")] = 2,
    threads: Threads = 1,
    quick: Quick = False,
) -> Result:
    """Forecasts of `tba plan` against steps of five families on this machine: time and peak."""
    names = family or (["conv"] if quick else list(FAMILIES))
    check_names(names, FAMILIES, "family")
    forecasts: dict[str, list[dict[str, Any]]] = {name: [] for name in names}
    steps: dict[str, _Rounds] = {}
    peaks: dict[str, int] = {}
    every: dict[str, Measured] = {}
    ways = {f"{name}, {way}": (name, way) for name in names for way in _WAYS}
    specs = [
        CPU.spec(arm, {"family": name, "checkpoint": _WAYS[way]}, threads=threads) for arm, (name, way) in ways.items()
    ]
    for _ in range(1 if quick else rounds):
        with progress("forecasts", len(names)) as bar:
            for name in names:
                forecasts[name].append(_forecast_here(name, threads))
                bar.advance(name)
        for arm, found in measure(specs, rounds=_STEPS, title="steps", warm_up=_WARM_UP).items():
            name, way = ways[arm]
            forecast_s, cpu_s = forecasts[name][-1]["steps"][_POLICIES[way]]["step_s"], median(found.cpu_s) / threads
            taken = {"forecast_s": forecast_s, "cpu_s": cpu_s, "wall_s": median(found.wall_s)}
            for figure, value in (taken | {"ratio": cpu_s / forecast_s}).items():
                steps.setdefault(arm, {}).setdefault(figure, []).append(value)
            peaks[arm] = max(peaks.get(arm, 0), found.peak_bytes)
            every[arm] = found
    tables = [_steps_table(steps), _memory_table(forecasts, peaks)]
    data = {
        "forecasts": forecasts,
        "wall_s": {arm: found["wall_s"] for arm, found in steps.items()},
        "cpu_s_by_thread": {arm: found["cpu_s"] for arm, found in steps.items()},
        "measured_by_forecast": {arm: found["ratio"] for arm, found in steps.items()},
        "peak_bytes": peaks,
    }
    environment = environment_block(every, threads=threads)
    return Result(theme="forecast", tables=tables, data=data, environment=environment)


def _forecast_here(family: str, threads: int) -> dict[str, Any]:
    """Run `tba plan`, under the allocator that the arms get."""
    tba = [sys.executable, "-m", "tba"]
    plan = [*tba, "plan", f"benchmarks._workload.subjects:{family}", "--device", "here", "--disk", "none"]
    command = [*tba, "run", "--", *plan, "--optimizer", "sgd", "--json"]
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads)}
    done = subprocess.run(command, cwd=_ROOT, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise CannotMeasure(f"tba plan of {family} ended with status {done.returncode}:\n{done.stderr}")
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def _steps_table(steps: Mapping[str, _Rounds]) -> Grid:
    columns: list[Column] = [
        ("arm", str),
        ("forecast s", lambda arm: f"{median(steps[arm]['forecast_s']):.3f}"),
        ("CPU s", lambda arm: f"{median(steps[arm]['cpu_s']):.3f}"),
        ("wall s", lambda arm: f"{median(steps[arm]['wall_s']):.3f}"),
        ("CPU / forecast", lambda arm: f"{median(steps[arm]['ratio']):.2f}"),
        ("least to most", lambda arm: f"{min(steps[arm]['ratio']):.2f} to {max(steps[arm]['ratio']):.2f}"),
    ]
    every = sorted(ratio for found in steps.values() for ratio in found["ratio"])
    note = (
        f"Medians of {len(every) // len(steps)} rounds; in each, every family is forecast (which measures the machine "
        "again) and then run. The machine is shared, so we compare CPU seconds per thread in the forecast and in the "
        "step; wall time is shown beside them. Ratios are within a round. Over all: "
        f"{every[0]:.2f} to {every[-1]:.2f}, median {median(every):.2f}."
    )
    return Grid.of("Steps here", steps, columns, note)


def _memory_table(forecasts: Mapping[str, Sequence[Mapping[str, Any]]], peaks: Mapping[str, int]) -> Grid:
    def forecast_bytes(family: str) -> int:
        memory = forecasts[family][0]["memory_bytes"]
        return int(memory["peak_all_kept"] - memory["weights"])

    columns: list[Column] = [
        ("family", str),
        ("saves MiB", lambda family: mib(forecasts[family][0]["saved_bytes"]["all"])),
        ("peak, forecast MiB", lambda family: mib(forecast_bytes(family))),
        ("peak, measured MiB", lambda family: mib(peaks[f"{family}, all kept"])),
        ("measured / forecast", lambda family: f"{peaks[f'{family}, all kept'] / forecast_bytes(family):.2f}"),
    ]
    note = (
        "Peak: saved tensors, gradients and operator workspace; measured: resident, over idle, under jemalloc. "
        "tests/tba_forecast checks that saved bytes equal what the engine counts."
    )
    return Grid.of("Memory here", forecasts, columns, note)
