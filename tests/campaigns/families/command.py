"""The command `families`: trains every small architecture of transformers by plan, and compares with plain PyTorch."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks._processes.child import ChildError
from benchmarks._report.results import Grid, Result

from ..runner import ask_all, result, verdict_of
from .catalog import TASKS, families
from .trial import BAD, SHARES, VERDICTS, Arm, Outcome

HUNG_S = 300.0
_CHUNK = 8  # families of one process
# MKL's kernels that are the same on every processor. They take other paths for other strides, so that a graph which is
# not the same shows in the bits; the kernels of a new processor hide most of that in matrices as small as these.
KERNELS = {"MKL_CBWR": "COMPATIBLE"}


def run_families(
    only: str = "", seed: int = 0, *, native: bool = False, jobs: int = 2, path: Path | None = None
) -> Result:
    """Run the families whose name has a match of `only`, in `jobs` processes at a time."""
    names = [family.name for family in families() if re.search(only, family.name)]

    def outcome(name: str, answer: Any) -> Outcome:
        if isinstance(answer, ChildError):
            return Outcome(name, verdict_of(answer), answer.words[-600:])
        return Outcome(**{**answer, "arms": [Arm(**arm) for arm in answer["arms"]]})

    def bad(outcome: Outcome) -> str:
        return f"{outcome.name}: {outcome.verdict}: {outcome.detail}" if outcome.verdict in BAD else ""

    outcomes = ask_all(
        "families",
        names,
        outcome,
        bad,
        arguments=lambda directory: [directory, str(seed)],
        timeout_s=HUNG_S,
        path=path,
        jobs=jobs,
        chunk=_CHUNK,
        variables={} if native else KERNELS,
    )
    data: dict[str, Any] = {
        "seed": seed,
        "counts": _counts(outcomes),
        "reasons": dict(_reasons(outcomes).most_common()),
        "families": [asdict(outcome) for outcome in outcomes],
        "bad": [said for outcome in outcomes if (said := bad(outcome))],
    }
    return result("families", [_each(outcomes), _reasons_table(outcomes), _left_out(outcomes), _totals(outcomes)], data)


def _counts(outcomes: Sequence[Outcome]) -> dict[str, dict[str, int]]:
    """Count by task, and in all: families, each verdict, and those of which blocks recompute."""
    counts = {task: Counter[str]() for task in (*TASKS, "all")}
    for outcome in outcomes:
        for task in (outcome.name.partition("/")[0], "all"):
            counts[task].update(["families", outcome.verdict])
            counts[task]["recompute"] += any(arm.recomputed for arm in outcome.arms)
    return {task: dict(count) for task, count in counts.items()}


def _reasons(outcomes: Sequence[Outcome]) -> Counter[str]:
    """Count the families of which some block never recomputes, by reason."""
    return Counter(reason for outcome in outcomes for reason in {r for arm in outcome.arms for r in arm.why_not})


def _each(outcomes: Sequence[Outcome]) -> Grid:
    rows = []
    for outcome in outcomes:
        if outcome.verdict == "not small":
            continue
        arms = [
            "refused" if arm.refused else f"{arm.recomputed} of {arm.blocks}{', differs' if arm.difference else ''}"
            for arm in outcome.arms
        ]
        why_not = sorted({reason for arm in outcome.arms for reason in arm.why_not})
        rows.append(
            (outcome.name, outcome.verdict, *(arms or [""] * len(SHARES)), "; ".join([outcome.detail, *why_not]))
        )
    columns = ("family", "verdict", *(f"{share:.0%}" for share in SHARES), "detail; why blocks never recompute")
    note = "Under each budget (of what a plain step saves): blocks that recompute, of all blocks that were found."
    return Grid("Families", columns, rows, note)


def _reasons_table(outcomes: Sequence[Outcome]) -> Grid:
    rows = [(reason, str(count)) for reason, count in _reasons(outcomes).most_common()]
    return Grid("Why blocks never recompute", ("reason", "families"), rows)


def _left_out(outcomes: Sequence[Outcome]) -> Grid:
    rows = [(outcome.name, outcome.detail) for outcome in outcomes if outcome.verdict == "not small"]
    return Grid("Not built small", ("family", "why"), rows)


def _totals(outcomes: Sequence[Outcome]) -> Grid:
    columns = ("families", "recompute", *VERDICTS)
    rows = [(task, *(str(count.get(each, 0)) for each in columns)) for task, count in _counts(outcomes).items()]
    note = (
        "Equal: losses and all gradients of six steps are bit for bit those of plain PyTorch, under each budget. "
        "Refused: a BudgetError under every budget. Not planned: nothing moved and nothing recomputed. Unsteady: plain "
        "differs from plain. Differs, raised, hung and crashed have to be 0."
    )
    return Grid("Totals", ("task", *columns), rows, note)
