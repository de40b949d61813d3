"""The command `programs`: runs the random programs of some seeds and counts their verdicts.

Each seed is a program of 4 to 40 instructions (views, edits in place, custom Functions, checkpoints, threads, kept and
dropped graphs) run in one of eleven ways: over windows of several sizes, late, failing and losing stores, codecs, and
interrupted by a SIGINT at a random line of the engine.
"""

from __future__ import annotations

import tempfile
import threading
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

from benchmarks._processes.child import ChildError
from benchmarks._report.environment import environment_block
from benchmarks._report.progress import progress
from benchmarks._report.results import Grid, Result
from benchmarks._workload.tools import scratch_directory

from ..runner import Runner
from .check import WAYS

HUNG_S = 120.0
_CHUNK = 500  # programs of one process
BAD = ("wrong", "broken", "hung", "crashed")
_VERDICTS = ("ok", "struck", *BAD)
_ROWS = (*WAYS, "losing", "interrupted")

Case = tuple[int, str, str, str]  # seed, way, verdict, detail


def run_programs(first: int, count: int, *, jobs: int, path: Path | None = None) -> Result:
    """Run the programs of `count` seeds from `first` on, in `jobs` processes at a time."""
    parent = scratch_directory((path,) if path is not None else None)
    chunks = [range(begin, min(begin + _CHUNK, first + count)) for begin in range(first, first + count, _CHUNK)]
    cases: list[Case] = []
    stopped = threading.Event()
    with (
        tempfile.TemporaryDirectory(dir=parent) as directory,
        progress("programs", count) as bar,
        ThreadPoolExecutor(jobs) as pool,
    ):

        def run(seeds: range) -> None:
            for case in _run_chunk(seeds, directory):
                cases.append(case)
                seed, way, verdict, detail = case
                if verdict in BAD:
                    bar.say(f"seed {seed} ({way}): {verdict}: {detail}")
                bar.advance(f"{sum(case[2] in BAD for case in cases)} bad")
                if stopped.is_set():
                    return

        try:
            list(pool.map(run, chunks))
        finally:
            stopped.set()
    cases.sort()
    bad = [dict(zip(("seed", "way", "verdict", "detail"), case, strict=True)) for case in cases if case[2] in BAD]
    counts = Counter((way, verdict) for _, way, verdict, _ in cases)
    data: dict[str, Any] = {
        "seeds": [first, first + count - 1],
        "counts": {way: {verdict: counts[way, verdict] for verdict in _VERDICTS} for way in _ROWS},
        "bad": bad,
    }
    tables, environment = [_table(counts, first, first + count - 1)], environment_block({}, threads=1)
    return Result(theme="programs", tables=tables, data=data, environment=environment, package="tests.campaigns")


def _run_chunk(seeds: range, directory: str) -> Iterator[Case]:
    """Run some seeds in one process; in another after one that hangs or ends it."""
    with closing(Runner("tests.campaigns.programs.worker", lambda: [directory], timeout_s=HUNG_S)) as runner:
        for seed in seeds:
            try:
                way, verdict, detail = runner.ask(seed)
            except ChildError as error:
                way, verdict, detail = "?", "hung" if error.hung else "crashed", error.words
            yield seed, way, verdict, detail


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
