"""The command `signals`: strikes training programs with signals at random moments, and counts what came of it.

Each seed is a program that trains until ten signals have been handled: in one of six ways (windows, budgets, codecs),
attached or in a `with` statement, with one of seven signals, whose handler raises, interrupts, exits, saves or trains.
"""

from __future__ import annotations

import tempfile
from collections import Counter
from contextlib import closing
from pathlib import Path
from typing import Any

from benchmarks._processes.child import ChildError
from benchmarks._report.environment import environment_block
from benchmarks._report.progress import progress
from benchmarks._report.results import Grid, Result
from benchmarks._workload.tools import scratch_directory

from ..runner import Runner
from .trainee import KINDS, SIGNALS

HUNG_S = 150.0


def run_signals(first: int, count: int, *, path: Path | None = None) -> Result:
    """Run the programs of seeds from `first` on, until `count` signals have been handled, in one process."""
    parent = scratch_directory((path,) if path is not None else None)
    counts: Counter[tuple[str, str]] = Counter()
    bad: list[dict[str, Any]] = []
    seed = first
    with (
        tempfile.TemporaryDirectory(dir=parent) as directory,
        progress("signals", count) as bar,
        closing(Runner("tests.campaigns.signals.worker", lambda: [directory], timeout_s=HUNG_S)) as runner,
    ):
        for seed in range(first, first + max(1, -(-count // SIGNALS))):
            try:
                way, kind, handled, raised, caught, wrong = runner.ask(seed)
                verdict = "wrong"
            except ChildError as error:
                way, kind, handled, raised, caught, wrong = "?", "?", 0, 0, 0, error.words or "ended"
                verdict = "hung" if error.hung else "crashed"
            counts[kind, "programs"] += 1
            counts[kind, "signals"] += handled
            counts[kind, "raised"] += raised
            counts[kind, "swallowed"] += raised - caught
            if wrong:
                counts[kind, verdict] += 1
                bad.append({"seed": seed, "way": way, "kind": kind, "verdict": verdict, "detail": wrong})
                bar.say(f"seed {seed} ({way}, {kind}): {verdict}: {wrong}")
            bar.advance(f"{len(bad)} bad")
    columns = ("programs", "signals", "raised", "swallowed", "wrong", "hung", "crashed")
    data: dict[str, Any] = {
        "seeds": [first, seed],
        "counts": {kind: {name: counts[kind, name] for name in columns} for kind in KINDS},
        "bad": bad,
    }
    rows = [(kind, *(str(counts[kind, name]) for name in columns)) for kind in (*KINDS, "?")]
    total = [str(sum(counts[kind, name] for kind in (*KINDS, "?"))) for name in columns]
    note = (
        "Signals: handled, each at a random moment of a step. Raised: by their handlers; swallowed: of those, what the "
        "program did not get. Wrong: a step that came to its end, or what a handler trained, has other gradients than "
        "in plain PyTorch; a handler, a record or hooks are left. Swallowed, wrong, hung and crashed have to be 0."
    )
    table = Grid(f"Signals, seeds {first} to {seed}", ("handler", *columns), [*rows, ("all", *total)], note)
    environment = environment_block({}, threads=1)
    return Result(theme="signals", tables=[table], data=data, environment=environment, package="tests.campaigns")
