"""The command `state`: runs random models whose blocks keep hidden state under budgets, and counts outcomes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks._processes.child import ChildError
from benchmarks._report.results import Grid, Result

from ..runner import ask_all, result, verdict_of
from .program import STATELESS, draw, kinds
from .trial import BAD, VERDICTS, Outcome

HUNG_S = 120.0
_CHUNK = 250  # programs of one process


def run_state(seeds: range, kind: str | None = None, *, jobs: int = 2, path: Path | None = None) -> Result:
    """Run the programs of some seeds, in `jobs` processes at a time; of one kind of state, if one is named."""

    def outcome(seed: int, answer: Any) -> Outcome:
        if not isinstance(answer, ChildError):
            return Outcome(**{**answer, "kinds": tuple(answer["kinds"])})
        program = draw(seed, kind)
        names = tuple(name for state in program.states for name in state.names())
        return Outcome(seed, verdict_of(answer), answer.words[-600:], str(program), names, not names, program.slow)

    def said(outcome: Outcome) -> str:
        return f"{outcome.seed}: {outcome.verdict}: {outcome.text}: {outcome.detail}"

    outcomes = ask_all(
        "state",
        seeds,
        outcome,
        lambda each: said(each) if each.verdict in BAD else "",
        arguments=lambda directory: [directory, *([kind] if kind is not None else [])],
        timeout_s=HUNG_S,
        path=path,
        jobs=jobs,
        chunk=_CHUNK,
    )
    data: dict[str, Any] = {
        "seeds": [seeds.start, seeds.stop - 1],
        "counts": dict(Counter(outcome.verdict for outcome in outcomes)),
        "kinds": {name: dict(count) for name, count in tally(outcomes).items()},
        "recompute": recomputing(outcomes),
        "reasons": dict(_reasons(outcomes).most_common()),
        "bad": [said(outcome) for outcome in outcomes if outcome.verdict in BAD],
    }
    return result("state", [_by_kind(outcomes), _by_reason(outcomes), _totals(outcomes)], data)


def tally(outcomes: Sequence[Outcome]) -> dict[str, Counter[str]]:
    """Count by kind of state: models, each verdict, and those of which blocks recompute."""
    counts = {name: Counter[str]() for name in (STATELESS, *kinds(), "all")}
    for outcome in outcomes:
        for name in (*(dict.fromkeys(outcome.kinds) or (STATELESS,)), "all"):
            counts[name].update(["models", outcome.verdict, *(["recompute"] if outcome.recomputed else [])])
    return counts


def recomputing(outcomes: Sequence[Outcome]) -> dict[str, list[int]]:
    """Count the models of which blocks recompute, and all, on the slow link and on the fast one."""
    found = {}
    for name, stateless in ((STATELESS, True), ("some", False)):
        for link, slow in (("slow", True), ("fast", False)):
            of = [each for each in outcomes if each.stateless is stateless and each.slow is slow and each.blocks]
            found[f"state: {name}, {link} link"] = [sum(each.recomputed > 0 for each in of), len(of)]
    return found


def _reasons(outcomes: Sequence[Outcome]) -> Counter[str]:
    counts: Counter[str] = Counter()
    for outcome in outcomes:
        counts.update(outcome.why_not)
    return counts


def _by_kind(outcomes: Sequence[Outcome]) -> Grid:
    columns = ("models", "recompute", *VERDICTS)
    rows = [(name, *(str(count[each]) for each in columns)) for name, count in tally(outcomes).items() if count]
    return Grid("By kind of state", ("kind", *columns), rows, "A model with several states is counted by each.")


def _by_reason(outcomes: Sequence[Outcome]) -> Grid:
    rows = [(reason, str(count)) for reason, count in _reasons(outcomes).most_common()]
    return Grid("Why blocks never recompute", ("reason", "blocks"), rows)


def _totals(outcomes: Sequence[Outcome]) -> Grid:
    counts = Counter(outcome.verdict for outcome in outcomes)
    rows = [(name, str(counts[name])) for name in VERDICTS]
    rows += [(f"recompute; {name}", f"{some} of {of}") for name, (some, of) in recomputing(outcomes).items()]
    note = (
        "Equal: losses, gradients, weights, random numbers and the hidden state are bit for bit those of plain. "
        "Refused: a BudgetError under each budget. Invalid: plain PyTorch raises or differs from itself. Wrong, error "
        "(which plain does not raise), hung and crashed have to be 0. Models without state have to recompute on the "
        "slow link, or nothing is shown."
    )
    return Grid(f"{len(outcomes)} models", ("what", "models"), rows, note)
