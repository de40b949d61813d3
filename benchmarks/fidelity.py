"""The fidelity benchmark: the validation loss that saving less costs, at equal tokens and an equally tuned rate.

Two tasks: a GPT that learns the bytes of Python's standard library, without the packages it is validated on; and the
fine-tuning of that GPT to read the handwritten digits that scikit-learn ships, validated on a fifth of them. Every arm
trains the same model on the same batches from the same weights, seed by seed. The first seed is trained at each rate of
one grid; the rate that validated best trains the other seeds. Gaps are differences to plain within a seed, so that the
seed's own share cancels. What it buys is measured apart, alone and in turns: the peak and the time of a step.

Runs that are finished are kept, a file each, so that hours of training can end early and go on.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

from ._fidelity.arms import KEPT
from ._fidelity.digits import PIXELS
from ._fidelity.run_store import RunStore
from ._fidelity.summary import (
    EXACT,
    PLAIN,
    Found,
    loss_table,
    make_bars,
    paper_tables,
    spread,
    summarise,
    title,
)
from ._fidelity.training import FidelityOptions
from ._processes.arms import Arm, Spec, ask_all
from ._processes.measure import measure
from ._report.bar import bar_table
from ._report.environment import environment_block
from ._report.progress import ProgressBar, progress
from ._report.results import CannotMeasure, Result
from ._report.steps import Measured

Arms = Mapping[str, Mapping[str, Any]]
# tba's presets and the arms by PRAC and GACT, which both tasks have, with the papers' ranks and intervals.
_PRESETS: Arms = {PLAIN: {}, **{name: {"settings": {"compress": name}} for name in (EXACT, "safe8", "balanced", "max")}}
_PAPERS: Arms = {
    "PRAC-like": {"principal": {"linear_share": 0.3, "norm_share": 0.0, "refresh": 500}},
    "PRAC-like, norms too": {"principal": {"linear_share": 0.3, "norm_share": 0.2, "refresh": 500}},
    "GACT-like, 4 bits": {"adaptive": {"bits": 4.0, "refresh": 1000}},
}


def _compact(rank: float, refresh: int, alpha: float) -> Mapping[str, Any]:
    return {"convert": {"rank": rank, "refresh": refresh, "alpha": alpha}}


# CompAct, arXiv 2410.15352: ranks and refresh of its tables 2 and 4, and the alpha of table 4. That of table 2, 0.25,
# goes with a learning rate of 0.01; with 1 a step is as long as Adam's, and one grid of rates is as wide for all arms.
TEXT_ARMS: Arms = {
    **_PRESETS,
    "fresh Gaussian n/4, Adam": {"settings": {"compress": "compact", "rank": 1 / 4}},
    "CompAct n/2": _compact(1 / 2, 50, 1.0),
    "CompAct n/4": _compact(1 / 4, 50, 1.0),
    "CompAct n/8": _compact(1 / 8, 50, 1.0),
    **_PAPERS,
}
DIGIT_ARMS: Arms = {**_PRESETS, "CompAct r=4": _compact(4, 500, 4.0), "CompAct r=8": _compact(8, 500, 2.0), **_PAPERS}


@dataclass(frozen=True, kw_only=True)
class Study:
    """One task: the run of plain, the arms as fields that differ from it, and the learning rates tried."""

    base: FidelityOptions
    arms: Arms
    rates: Sequence[float]


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What is trained, and how often steps are measured: `rounds` timed turns in `starts` sets of processes.

    `keeps`: whether finished runs outlive the benchmark.
    """

    studies: Mapping[str, Study]
    rounds: int
    starts: int = 1
    keeps: bool = True

    def changed(self, *, steps: int | None, rates: Sequence[float] | None, tasks: Sequence[str]) -> Plan:
        """The plan for some tasks, with so many steps of pre-training and a share of them of fine-tuning, or rates."""
        studies = {}
        for task in tasks:
            study = self.studies[task]
            if steps is not None:
                study = replace(study, base=_with_steps(study.base, steps))
            studies[task] = replace(study, rates=rates or study.rates)
        return replace(self, studies=studies)


# A run takes some five minutes on one core.
_TEXT = FidelityOptions(layers=4, width=256, heads=8, sequence=128, batch=4, steps=2000)
_TINY = FidelityOptions(layers=1, width=32, heads=2, sequence=64, batch=4, steps=4, validation_batches=2)
_TUNING_SHARE = 0.3
_START_RATE = 1e-3
_RATES = (3e-4, 1e-3, 3e-3)
_ALL_DIGITS = 22  # batches of 16, of the 360 that are held out


def _fine_tuning(text: FidelityOptions, **fields: Any) -> FidelityOptions:
    start = replace(text, learning_rate=_START_RATE)
    base = replace(text, task="digits", **fields)
    return _with_steps(replace(base, start=asdict(start)), text.steps)


def _with_steps(base: FidelityOptions, steps: int) -> FidelityOptions:
    if base.start is None:
        return replace(base, steps=steps)
    return replace(base, steps=max(1, round(_TUNING_SHARE * steps)), start={**base.start, "steps": steps})


PLAN = Plan(
    studies={
        "text": Study(base=_TEXT, arms=TEXT_ARMS, rates=_RATES),
        "digits": Study(
            base=_fine_tuning(_TEXT, batch=16, sequence=PIXELS, validation_batches=_ALL_DIGITS),
            arms=DIGIT_ARMS,
            rates=_RATES,
        ),
    },
    rounds=30,
    starts=2,
)
# One arm of each kind: processes are what takes long.
TINY_PLAN = Plan(
    studies={
        "text": Study(
            base=_TINY,
            arms={
                name: TEXT_ARMS[name]
                for name in (PLAIN, EXACT, "balanced", "CompAct n/4", "PRAC-like", "GACT-like, 4 bits")
            },
            rates=(1e-2,),
        ),
        "digits": Study(
            base=_fine_tuning(_TINY, sequence=PIXELS),
            arms={name: DIGIT_ARMS[name] for name in (PLAIN, "CompAct r=8")},
            rates=(1e-2,),
        ),
    },
    rounds=2,
    keeps=False,
)


def run_fidelity(
    plan: Plan = PLAN,
    *,
    seeds: int = 3,
    jobs: int = 2,
    threads: int = 1,
    resume: bool = False,
    out: Path,
) -> Result:
    """Train all arms, `jobs` at a time, one thread each; then measure their steps, alone.

    Args:
        plan: what is trained.
        seeds: number of seeds, at most ten.
        jobs: arms at a time.
        threads: of the steps that are measured.
        resume: go on with the runs that are finished.
        out: the folder of the picture, and of finished runs.

    Raises:
        CannotMeasure: there are finished runs, and nobody said to go on with them.
    """
    from ._pictures.pareto import Panel, draw_pareto  # here: without matplotlib this says so before it trains

    with _store(plan, out) as store:
        if len(store) and not resume:
            raise CannotMeasure(
                f"{store.folder} holds {len(store)} finished runs: go on with them by --resume, or remove the folder"
            )
        answers = _train_all(plan, seeds, jobs, store)
    panels, tables, bars = [], [], []
    studies: dict[str, Any] = {}
    allocators: dict[str, str] = {}
    for task, study in plan.studies.items():
        raw = {name: answers[task, name].about for name in study.arms}
        costs = _measure_costs(plan, task, study, threads)
        found = summarise(raw, costs)
        allocators |= {"trained": answers[task, PLAIN].allocator, "measured": costs[PLAIN].allocator}
        bars += make_bars(task, found)
        tables += [loss_table(study.base, found, study.rates), *paper_tables(task, found)]
        panels += _panels(study, found, Panel)
        studies[task] = {
            "run": asdict(study.base),
            "trained_bytes": study.base.trained_bytes,
            "rates": list(study.rates),
            "arms": {name: one.data() for name, one in found.items()},
            "runs": {name: body["runs"] for name, body in raw.items()},
            "seed_spread": spread(found),
        }
    out.mkdir(parents=True, exist_ok=True)
    picture = out / "fidelity.png"
    draw_pareto(panels, picture)
    data = {"seeds": list(range(seeds)), "tasks": studies, "bars": [bar.data() for bar in bars]}
    return Result(
        theme="fidelity",
        tables=[*tables, bar_table(bars)],
        data=data,
        files=[picture],
        picture=picture,
        environment=environment_block(allocators, threads=threads),
    )


@contextmanager
def _store(plan: Plan, out: Path) -> Iterator[RunStore]:
    if plan.keeps:
        yield RunStore(out / "fidelity_runs")
        return
    with TemporaryDirectory(prefix="fidelity-") as folder:
        yield RunStore(Path(folder))


def _train_all(plan: Plan, seeds: int, jobs: int, store: RunStore) -> dict[tuple[str, str], Arm]:
    specs, keys, total = [], [], 0
    for task, study in plan.studies.items():
        for name, how in study.arms.items():
            rates, numbers = list(study.rates), list(range(seeds))
            if name == EXACT:  # a check, which one run is enough for
                rates, numbers = [rates[len(rates) // 2]], [0]
            options = {
                "run": {**asdict(study.base), **how},
                "rates": rates,
                "seeds": numbers,
                "folder": str(store.folder.absolute()),
            }
            specs.append(Spec(name=f"{task}: {name}", role="_fidelity.arms:train_arm", options=options, threads=1))
            keys.append((task, name))
            total += len(rates) + len(numbers) - 1
    with progress("fidelity", total) as bar:
        if plan.keeps:
            bar.say(
                f"{total} trainings, {jobs} at a time; what is finished stays in {store.folder}, and --resume goes on"
            )
        answers = ask_all(specs, jobs=jobs, tell=_teller(bar, total))
    return dict(zip(keys, answers, strict=True))


def _teller(bar: ProgressBar, total: int) -> Callable[[Spec, str], None]:
    """Show each run that comes to its end, and the hours that are left as long as runs take as they did."""
    begun_s, done, trained = time.monotonic(), 0, 0

    def tell(spec: Spec, note: str) -> None:
        nonlocal done, trained
        done, trained = done + 1, trained + (not note.startswith(KEPT))
        hours = (time.monotonic() - begun_s) / trained * (total - done) / 3600 if trained else None
        bar.advance(f"{spec.name}: {note}" + ("" if hours is None else f"; {hours:.1f} h left"))

    return tell


def _measure_costs(plan: Plan, task: str, study: Study, threads: int) -> dict[str, Measured]:
    specs = []
    for name, how in study.arms.items():
        options = {**asdict(study.base), **how, "learning_rate": study.rates[0], "start": None}
        if options["settings"]:
            options |= {"tier": "keep", "settings": {**options["settings"], "min_tensor_bytes": 0}}
        specs.append(Spec(name=name, role="_fidelity.arms:CostArm", options=options, allocator="auto", threads=threads))
    return measure(specs, rounds=plan.rounds, title=f"steps of {task}", starts=plan.starts)


def _panels(study: Study, found: Mapping[str, Found], panel: Callable[..., Any]) -> list[Any]:
    """The gaps of a task against peak, and against the time of a step."""
    gaps = {name: list(one.gaps.values()) for name, one in found.items() if name not in (PLAIN, EXACT)}
    given = {"title": title(study.base), "spread": spread(found)}
    return [
        panel({name: (found[name].peak_share, own) for name, own in gaps.items()}, "peak memory / plain's", **given),
        panel(
            {name: (median(found[name].step_ratios), own) for name, own in gaps.items()}, "step time / plain's", **given
        ),
    ]
