"""The command `programs`: runs batches of random programs and counts their verdicts.

Each program has 4 to 40 instructions (views, edits in place, custom Functions, checkpoints, threads, kept and dropped
graphs) and runs in one of eleven ways: over windows of several sizes, late, failing and losing stores, codecs, and
interrupted by a SIGINT at a random line of the engine.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

from benchmarks._processes.child import ChildError
from benchmarks._report.results import Result

from ..device import theme_of
from ..runner import ask_all, result, totals, verdict_of
from .check import LOSING, ON_DEVICE, WAYS
from .worker import BATCH

HUNG_S = 600.0  # of a batch
_CHUNK = 10  # batches of one process
BAD = ("wrong", "broken", "hung", "crashed")
_VERDICTS = ("ok", "struck", *BAD)


def run_programs(first: int, count: int, *, jobs: int, path: Path | None = None, device: str = "cpu") -> Result:
    """Run `count` programs on a device, in batches of seeds from `first` on, in `jobs` processes at a time."""
    seeds = range(first, first + -(-count // BATCH))

    def outcome(seed: int, answer: Any) -> dict[str, Any]:
        if isinstance(answer, ChildError):
            verdict = verdict_of(answer)
            answer = {"counts": [["?", verdict, 1]], "failed": {"verdict": verdict, "detail": answer.words}}
        return {"seed": seed, **answer}

    def bad(batch: dict[str, Any]) -> str:
        failed = batch["failed"]
        return f"seed {batch['seed']}: {failed['verdict']}: {failed['detail']}" if failed else ""

    batches = ask_all(
        "programs",
        seeds,
        outcome,
        bad,
        arguments=lambda directory: [directory, device],
        timeout_s=HUNG_S,
        path=path,
        jobs=jobs,
        chunk=_CHUNK,
    )
    ways = WAYS if device == "cpu" else WAYS | ON_DEVICE
    counts = {way: Counter[str]() for way in (*ways, LOSING, "interrupted", "?")}
    for batch in batches:
        for way, verdict, number in batch["counts"]:
            counts[way][verdict] += number
    note = (
        "Ok: every instruction left the same bits as plain PyTorch in every tensor and gradient, or raised the same, "
        "and no record is left. Struck: a SIGINT at a random line of the engine ended the program; the same engine "
        "then ran another one as plain PyTorch does. Losing: reads fail too, and the program is told "
        "(TransferError). Wrong, broken (after an interrupt), hung and crashed have to be 0."
    )
    title = f"Random programs, {device}, {BATCH} of each seed from {first} to {seeds[-1]}"
    data = {
        "device": device,
        "seeds": [first, seeds[-1]],
        "counts": {way: {verdict: count[verdict] for verdict in _VERDICTS} for way, count in counts.items()},
        "bad": [{"seed": batch["seed"], **batch["failed"]} for batch in batches if batch["failed"]],
    }
    return result(theme_of("programs", device), [totals(title, "way", counts, _VERDICTS, note)], data)
