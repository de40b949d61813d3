"""Summary: losses, gaps and costs of all arms of a task, as tables and bars."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median, stdev
from typing import Any

from .._report.bar import Bar
from .._report.ratios import doubt, ratios
from .._report.results import MIB, Grid, mib
from .._report.steps import Measured, memory_share
from .training import TASKS, FidelityOptions

PLAIN, EXACT = "plain", "exact"
# Student's t for 95%, by the number of values less one: up to ten seeds.
_T95 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)
_GAP_BAR = 0.01  # nats
_WITHIN_NOISE = ("safe8", "balanced")
_RANKS = ("CompAct n/2", "CompAct n/4", "CompAct n/8")

# CompAct, arXiv 2410.15352. Table 2: perplexity on C4 of 60, 130, 350 million and 1 billion parameters, and peak in GB
# of 350 million. Table 4: average of GLUE, and peak in MB on RTE, of RoBERTa-base.
_FULL_PERPLEXITY, _FULL_GB = (34.06, 25.08, 18.80, 15.56), 39.97
_PERPLEXITY = {
    "CompAct n/2": ((32.78, 25.37, 19.26, 17.40), 37.94),
    "CompAct n/4": ((34.41, 26.98, 20.45, 18.02), 34.71),
    "CompAct n/8": ((36.42, 28.70, 21.91, 19.23), 33.03),
}
_FULL_GLUE, _FULL_MB = 86.28, 6298
_GLUE = {"CompAct r=4": (85.03, 3092), "CompAct r=8": (85.56, 3102)}


@dataclass(frozen=True, kw_only=True)
class Found:
    """What was found of one arm.

    Attributes:
        rate: the learning rate that was best for the first seed.
        losses, accuracies: of the validation, by seed, at that rate.
        gaps, accuracy_gaps: by seed, to plain's of the same seed.
        stored_share: bytes stored between forward and backward, as a share of plain PyTorch's.
        differs: whether a run's weights are not plain's of the same rate and seed; None where plain has no such run.
        peak_bytes, peak_share: peak over idle, and over plain's.
        step_s: median seconds of a step, what is learned now and then included.
        step_ratios: by round, to plain's.
    """

    rate: float
    losses: Mapping[int, float]
    accuracies: Mapping[int, float]
    gaps: Mapping[int, float]
    accuracy_gaps: Mapping[int, float]
    stored_bytes: int
    stored_share: float
    differs: bool | None
    peak_bytes: int
    peak_share: float
    step_s: float
    step_ratios: Sequence[float]

    def data(self) -> dict[str, Any]:
        return {**vars(self), "loss": mean(self.losses), "gap": mean(self.gaps), "gap_95": interval(self.gaps)}


def mean(values: Mapping[int, float]) -> float:
    """Mean over the seeds."""
    return sum(values.values()) / len(values)


def interval(values: Mapping[int, float]) -> float | None:
    """Half of the 95% confidence interval of the mean, by Student's t; None for one value or none that is finite."""
    known = list(values.values())
    if len(known) < 2 or not all(map(math.isfinite, known)):
        return None
    return _T95[len(known) - 2] * stdev(known) / math.sqrt(len(known))


def summarise(raw: Mapping[str, Mapping[str, Any]], costs: Mapping[str, Measured]) -> dict[str, Found]:
    """Compute losses, gaps and costs of each arm from the answers of their processes."""
    found: dict[str, Found] = {}
    plain, plain_cost = raw[PLAIN], costs[PLAIN]
    losses, accuracies = (_by_seed(plain, what) for what in ("validation_loss", "accuracy"))
    weights = {(run["learning_rate"], run["seed"]): run["weights_sha256"] for run in plain["runs"]}
    for name, body in raw.items():
        own, right, cost = _by_seed(body, "validation_loss"), _by_seed(body, "accuracy"), costs[name]
        same = [
            run["weights_sha256"] == weights[run["learning_rate"], run["seed"]]
            for run in body["runs"]
            if (run["learning_rate"], run["seed"]) in weights
        ]
        learn_s = cost.moved.get("learn_s", 0.0)
        found[name] = Found(
            rate=body["best_rate"],
            losses=own,
            accuracies=right,
            gaps={seed: loss - losses[seed] for seed, loss in own.items()},
            accuracy_gaps={seed: share - accuracies[seed] for seed, share in right.items()},
            stored_bytes=body["stored_bytes"],
            stored_share=body["stored_bytes"] / body["plain_bytes"],
            differs=not all(same) if same else None,
            peak_bytes=cost.peak_bytes,
            peak_share=memory_share(cost, plain_cost),
            step_s=median(cost.wall_s) + learn_s,
            step_ratios=ratios([wall_s + learn_s for wall_s in cost.wall_s], plain_cost.wall_s),
        )
    return found


def spread(found: Mapping[str, Found]) -> float:
    """Spread of plain's seeds: the highest loss less the lowest."""
    losses = found[PLAIN].losses.values()
    return max(losses) - min(losses)


def make_bars(task: str, found: Mapping[str, Found]) -> list[Bar]:
    """Limit what exact may differ and mild presets may lose; the losses of CompAct must fall as its rank rises."""
    bars = []
    if EXACT in found:
        differs = found[EXACT].differs
        what = f"{task}: exact, a whole training, differs from plain in a bit"
        bars.append(Bar(what=what, measured=float(differs is not False), limit=0.0, unit=""))
    for name in _WITHIN_NOISE:
        if name in found:
            gap, seeds = mean(found[name].gaps), spread(found)
            bars.append(Bar(what=f"{task}: {name}: gap to plain", measured=gap, limit=_GAP_BAR, unit=" nats"))
            what = f"{task}: {name}: gap, within the spread of seeds"
            bars.append(Bar(what=what, measured=gap, limit=seeds, unit=" nats"))
    for better, worse in pairwise(_RANKS):
        if better in found and worse in found:
            less = mean(found[better].losses) - mean(found[worse].losses)
            bars.append(
                Bar(what=f"{task}: loss of {better} less that of {worse}", measured=less, limit=0.0, unit=" nats")
            )
    for name, one in found.items():
        if name not in (PLAIN, EXACT, *_WITHIN_NOISE):
            bars.append(Bar(what=f"{task}: {name}: gap to plain", measured=mean(one.gaps), limit=None, unit=" nats"))
    return bars


def title(base: FidelityOptions) -> str:
    """Name a task and its size."""
    return (
        f"{base.task}: GPT {base.name}, {base.steps:,} steps of {base.batch} x {base.sequence} tokens"
        f"{'' if base.start is None else ', fine-tuned'}"
    )


def loss_table(base: FidelityOptions, found: Mapping[str, Found], rates: Sequence[float]) -> Grid:
    """Make the table of loss, accuracy, peak, time and bytes."""
    rows = []
    for name, one in found.items():
        edge = len(rates) > 1 and name != EXACT and one.rate in (min(rates), max(rates))
        rows.append(
            (
                name,
                mib(one.peak_bytes) if one.peak_bytes >= 10 * MIB else f"{one.peak_bytes / MIB:.1f}",
                f"{one.peak_share:.2f}",
                f"{1e3 * one.step_s:.1f}",
                f"{median(one.step_ratios):.3f} ± {doubt(one.step_ratios):.3f}",
                f"{one.stored_share:.3f}",
                f"{one.rate:g}{' (edge)' if edge else ''}",
                f"{mean(one.losses):.4f}",
                _gap(one.gaps, 4),
                f"{mean(one.accuracies):.2%}",
                _gap({seed: 100 * gap for seed, gap in one.accuracy_gaps.items()}, 2),
            )
        )
    columns = ("arm", "peak MiB", "/ plain", "step ms", "/ plain", "stored / plain", "rate", "loss, nats", "gap")
    held_out = base.validation_batches * base.batch * base.sequence
    note = (
        f"Learned: {TASKS[base.task].describe}. Loss and accuracy on {held_out:,} held-out tokens, means over "
        f"{len(found[PLAIN].losses)} seeds; gaps to plain within a seed, with 95% confidence by Student's t. Spread of "
        f"plain's seeds: {spread(found):.4f} nats. exact trains once, as a check. Rate: the best of "
        f"{', '.join(f'{rate:g}' for rate in rates)} for the first seed (edge: the best lies at an end of the grid). "
        "Peak: resident over idle, worst step, what PRAC-like and GACT-like learn now and then included; the time of "
        "that is spread over the steps between. Step: medians of steps measured alone, in turns. Stored: bytes between "
        "forward and backward, of what autograd saves without its duplicates. PRAC-like and GACT-like: our reading of "
        "the papers, not their code."
    )
    return Grid(title(base), (*columns, "accuracy", "gap, points"), rows, note)


def paper_tables(task: str, found: Mapping[str, Found]) -> list[Grid]:
    """Set CompAct beside its own table of the kind; no table where none of its ranks was run."""
    rows: list[tuple[str, ...]] = []
    columns: tuple[str, ...]
    if task == "text":
        for name in found.keys() & _PERPLEXITY.keys():
            perplexities, gigabytes = _PERPLEXITY[name]
            pairs = zip(perplexities, _FULL_PERPLEXITY, strict=True)
            nats = [f"{math.log(one / full):+.3f}" for one, full in pairs]
            rows.append((name, *nats, f"{gigabytes / _FULL_GB:.2f}", *_ours(found[name], found[name].gaps, 4)))
        columns = ("arm", "60M", "130M", "350M", "1B", "peak / full, 350M", "gap here", "peak / plain here")
        note = (
            "Paper: CompAct, arXiv 2410.15352, table 2; the logarithm of its perplexity over that of full rank, nats "
            "per token of C4. Here: nats per byte, so that only order and trend can be compared."
        )
        grid = Grid("CompAct beside its table of pre-training", columns, sorted(rows), note)
    else:
        for name in found.keys() & _GLUE.keys():
            average, megabytes = _GLUE[name]
            gaps = {seed: 100 * gap for seed, gap in found[name].accuracy_gaps.items()}
            rows.append(
                (name, f"{average - _FULL_GLUE:+.2f}", f"{megabytes / _FULL_MB:.2f}", *_ours(found[name], gaps, 2))
            )
        columns = ("arm", "GLUE, points", "peak / full, RTE", "points here", "peak / plain here")
        note = (
            "Paper: CompAct, arXiv 2410.15352, table 4, RoBERTa-base; its average over GLUE less that of full training."
        )
        grid = Grid("CompAct beside its table of fine-tuning", columns, sorted(rows), note)
    return [grid] if rows else []


def _ours(one: Found, gaps: Mapping[int, float], digits: int) -> tuple[str, str]:
    return _gap(gaps, digits), f"{one.peak_share:.2f}"


def _gap(gaps: Mapping[int, float], digits: int) -> str:
    half = interval(gaps)
    return f"{mean(gaps):+.{digits}f}" + ("" if half is None else f" ± {half:.{digits}f}")


def _by_seed(body: Mapping[str, Any], what: str) -> dict[int, float]:
    return {run["seed"]: run[what] for run in body["runs"] if run["learning_rate"] == body["best_rate"]}
