"""The programs benchmark: random training programs through the engine against plain PyTorch, and what became of them.

Each seed is a program of 4 to 40 instructions (views, edits in place, custom Functions, checkpoints, threads, kept and
dropped graphs) run in one of eleven ways: over windows of several sizes, late, failing and losing stores, codecs, and
interrupted by a SIGINT at a random line of the engine.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from ._harness import Grid, Result, environment_block, progress
from ._program_worker import HUNG_S
from ._train import scratch_directory
from .program_check import WAYS

_CHUNK = 500
BAD = ("wrong", "broken", "hung", "crashed")
_VERDICTS = ("ok", "struck", *BAD)
_ROWS = (*WAYS, "losing", "interrupted")


def run_programs(first: int, count: int, *, jobs: int, path: Path | None = None) -> Result:
    """Run the programs of `count` seeds from `first` on, in `jobs` processes at a time."""
    parent = scratch_directory((path,) if path is not None else None)
    chunks = [(begin, min(_CHUNK, first + count - begin)) for begin in range(first, first + count, _CHUNK)]
    cases: list[tuple[int, str, str, str]] = []
    with (
        tempfile.TemporaryDirectory(dir=parent) as directory,
        progress("programs", len(chunks)) as bar,
        ThreadPoolExecutor(jobs) as pool,
    ):
        for found in pool.map(lambda chunk: list(_run_chunk(*chunk, directory)), chunks):
            cases += found
            for seed, way, verdict, detail in found:
                if verdict in BAD:
                    bar.say(f"seed {seed} ({way}): {verdict}: {detail}")
            bar.advance(f"{sum(case[2] in BAD for case in cases)} bad")
    bad = [dict(zip(("seed", "way", "verdict", "detail"), case, strict=True)) for case in cases if case[2] in BAD]
    counts = Counter((way, verdict) for _, way, verdict, _ in cases)
    data: dict[str, Any] = {
        "seeds": [first, first + count - 1],
        "counts": {way: {verdict: counts[way, verdict] for verdict in _VERDICTS} for way in _ROWS},
        "bad": bad,
    }
    table = _table(counts, first, first + count - 1)
    return Result(theme="programs", tables=[table], data=data, environment=environment_block({}, threads=1))


def _run_chunk(first: int, count: int, directory: str) -> Iterator[tuple[int, str, str, str]]:
    """Run some seeds in a process, and the rest in another where one ends it."""
    seed, end = first, first + count
    while seed < end:
        worker = [sys.executable, "-m", "benchmarks._program_worker", str(seed), str(end - seed), directory]
        run = subprocess.run(
            worker, capture_output=True, text=True, cwd=Path(__file__).resolve().parent.parent, check=False
        )
        for line in run.stdout.splitlines():
            told = json.loads(line)
            seed = told.get("begins", seed)
            if "verdict" in told:
                yield told["seed"], told["way"], told["verdict"], told["detail"]
                seed = told["seed"] + 1
        if seed < end:  # it ended in the midst of this one
            hung = f"Timeout ({HUNG_S // 3600}:{HUNG_S // 60 % 60:02}" in run.stderr
            yield seed, "?", "hung" if hung else "crashed", run.stderr[-3000:]
            seed += 1


def _table(counts: Counter[tuple[str, str]], first: int, last: int) -> Grid:
    rows = [(way, *(str(counts[way, verdict]) for verdict in _VERDICTS)) for way in (*_ROWS, "?")]
    total = [str(sum(counts[way, verdict] for way in (*_ROWS, "?"))) for verdict in _VERDICTS]
    note = (
        "Ok: every instruction left the same bits as plain PyTorch in every tensor and gradient, or raised the same, "
        "and no record is left. Struck: a SIGINT at a random line of the engine ended the program; the same engine "
        "then ran another one as plain PyTorch does. Losing: reads fail too, and the program is told "
        "(TransferError). Wrong, broken (after an interrupt), hung and crashed have to be 0."
    )
    return Grid(f"Random programs, seeds {first} to {last}", ("way", *_VERDICTS), [*rows, ("all", *total)], note)
