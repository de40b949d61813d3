"""The command `signals`: strikes training programs with signals at random moments, and counts what came of it.

Each seed is a program that trains until ten signals have been handled: in one of six ways (windows, budgets, codecs),
attached or in a `with` statement, with one of seven signals, whose handler raises, interrupts, exits, saves or trains.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

from benchmarks._processes.child import ChildError
from benchmarks._report.results import Result

from ..runner import ask_all, result, totals, verdict_of
from .trainee import KINDS, SIGNALS

HUNG_S = 150.0
_COLUMNS = ("programs", "signals", "raised", "swallowed", "wrong", "hung", "crashed")


def run_signals(first: int, count: int, *, path: Path | None = None) -> Result:
    """Run the programs of seeds from `first` on, until `count` signals have been handled, in one process."""
    seeds = range(first, first + max(1, -(-count // SIGNALS)))

    def outcome(seed: int, answer: Any) -> dict[str, Any]:
        if isinstance(answer, ChildError):
            return {"seed": seed, "way": "?", "kind": "?", "verdict": verdict_of(answer), "detail": answer.words}
        return {"seed": seed, **answer, "verdict": "wrong" if answer["detail"] else ""}

    def bad(found: dict[str, Any]) -> str:
        return "{seed} ({way}, {kind}): {verdict}: {detail}".format(**found) if found["verdict"] else ""

    counts = {kind: Counter[str]() for kind in (*KINDS, "?")}
    programs = ask_all("signals", seeds, outcome, bad, timeout_s=HUNG_S, path=path)
    for found in programs:
        raised, caught = found.get("raised", 0), found.get("caught", 0)
        signals = {"signals": found.get("handled", 0), "raised": raised, "swallowed": raised - caught}
        counts[found["kind"]].update({"programs": 1, **signals, found["verdict"]: 1})
    data = {
        "seeds": [first, seeds[-1]],
        "counts": {kind: {name: counts[kind][name] for name in _COLUMNS} for kind in KINDS},
        "bad": [
            {name: found[name] for name in ("seed", "way", "kind", "verdict", "detail")}
            for found in programs
            if found["verdict"]
        ],
    }
    note = (
        "Signals: handled, each at a random moment of a step. Raised: by their handlers; swallowed: of those, what the "
        "program did not get. Wrong: a step that came to its end, or what a handler trained, has other gradients than "
        "in plain PyTorch; a handler, a record or hooks are left. Swallowed, wrong, hung and crashed have to be 0."
    )
    title = f"Signals, seeds {first} to {seeds[-1]}"
    return result("signals", [totals(title, "handler", counts, _COLUMNS, note)], data)
