"""Runner: asks the cases of a campaign in processes of their own, with a time limit, and counts what comes of them.

A campaign that is told to end (`end_when_told`) ends at once: the processes of its cases are killed, not waited for.
Python drops what a signal's handler raises within a finalizer, so the handler leaves a mark too, read before each case.
"""

from __future__ import annotations

import os
import signal
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import closing
from pathlib import Path
from typing import Any, TypeVar

from benchmarks._processes.child import Child, ChildError
from benchmarks._report.environment import environment_block
from benchmarks._report.progress import progress
from benchmarks._report.results import Grid, Result
from benchmarks._workload.tools import scratch_directory

_START_S = 120.0  # the first case of a process comes after the import of torch
_KILL_EVERY_S = 0.1  # a case that was about to start its process when the campaign ended is killed at the next look
_STATUS = 128 + signal.SIGTERM  # as a shell says it
_told = threading.Event()  # the process was told to end

Question = TypeVar("Question")
Outcome = TypeVar("Outcome")


class Runner:
    """The process that cases run in, replaced when a case hangs or takes it along.

    Args:
        module: run by `python -m`, one compute thread, without `TBA_` settings; it calls `serve`.
        arguments: makes the command line's arguments of each new process.
        timeout_s: a case that takes longer hangs.
        variables: of the environment, beside those that are there.
    """

    def __init__(
        self,
        module: str,
        arguments: Callable[[], Sequence[str]],
        *,
        timeout_s: float,
        variables: Mapping[str, str] | None = None,
    ) -> None:
        self.timeout_s = timeout_s
        self.child: Child | None = None
        self._module, self._arguments, self._variables = module, arguments, dict(variables or {})

    def ask(self, question: Any) -> Any:
        """Return the answer to a question. Raises ChildError; the next question then goes to another process."""
        timeout_s = self.timeout_s
        if self.child is None:
            environment = {name: value for name, value in os.environ.items() if not name.startswith("TBA_")}
            environment |= {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"} | self._variables
            self.child = Child("the process", self._module, *self._arguments(), environment=environment)
            timeout_s += _START_S
        try:
            return self.child.ask(question, timeout_s=timeout_s)
        except ChildError:
            self.close()
            raise

    def kill(self) -> None:
        """Kill the process, if there is one, from any thread: the question that it is asked ends with ChildError."""
        if (child := self.child) is not None:
            child.kill()

    def close(self) -> None:
        """End the process, if there is one."""
        child, self.child = self.child, None
        if child is not None:
            child.close()


def ask_all(
    theme: str,
    questions: Sequence[Question],
    outcome: Callable[[Question, Any], Outcome],
    bad: Callable[[Outcome], str],
    *,
    arguments: Callable[[str], Sequence[str]] = lambda directory: [directory],
    timeout_s: float,
    path: Path | None = None,
    jobs: int = 1,
    chunk: int = 1 << 30,
    variables: Mapping[str, str] | None = None,
) -> list[Outcome]:
    """Ask every question of `tests.campaigns.<theme>.worker`; return an outcome for each, in their order.

    However the campaign ends, no process or file of it is left.

    Args:
        outcome: of a question and its answer, or the ChildError where the case hung or ended its process.
        bad: describes an outcome that must not be, "" for any other. What it says is shown at once.
        arguments: of a process, given a directory that lasts as long as the campaign.
        jobs, chunk: processes at a time, and the questions that each of them is asked.
        path: where the directory is made. None: below `out/`.
    """
    found: dict[int, Outcome] = {}
    stopped = threading.Event()
    runners = list[Runner]()
    parent = scratch_directory((path,) if path is not None else None)
    place = tempfile.TemporaryDirectory(prefix=f"tba-{theme}-", dir=parent, ignore_cleanup_errors=True)
    with place as directory, progress(theme, len(questions)) as bar, ThreadPoolExecutor(jobs) as pool:

        def run(begin: int) -> None:
            module = f"tests.campaigns.{theme}.worker"
            one = Runner(module, lambda: arguments(directory), timeout_s=timeout_s, variables=variables)
            runners.append(one)
            with closing(one):
                for number in range(begin, min(begin + chunk, len(questions))):
                    if stopped.is_set() or _told.is_set():
                        return
                    try:
                        answer = one.ask(questions[number])
                    except ChildError as error:
                        answer = error
                    if stopped.is_set():
                        return  # the campaign has killed the case
                    found[number] = outcome(questions[number], answer)
                    if said := bad(found[number]):
                        bar.say(said)
                    bar.advance(f"{sum(bool(bad(each)) for each in list(found.values()))} bad")

        running = list[Future[None]]()
        try:
            for begin in range(0, len(questions), chunk):
                running.append(pool.submit(run, begin))
            for future in running:
                future.result()
        finally:
            stopped.set()
            while wait(running, timeout=_KILL_EVERY_S).not_done:
                for each in list(runners):
                    each.kill()
    if _told.is_set():
        raise SystemExit(_STATUS)
    return [found[number] for number in sorted(found)]


def end_when_told() -> None:
    """End this process at SIGTERM, after the processes and mounts of its campaign."""
    signal.signal(signal.SIGTERM, _terminated)


def _terminated(number: int, _: object) -> None:
    _told.set()
    sys.exit(_STATUS)


def verdict_of(error: ChildError) -> str:
    """Return the verdict on a case whose process gave no answer."""
    return "hung" if error.hung else "crashed"


def totals(title: str, what: str, counts: Mapping[str, Mapping[str, int]], columns: Sequence[str], note: str) -> Grid:
    """Lay counts out as a table: a row for each name, a column for each of `columns`, and the sums in a last row."""
    rows = [(name, *(str(count.get(column, 0)) for column in columns)) for name, count in counts.items()]
    sums = [str(sum(count.get(column, 0) for count in counts.values())) for column in columns]
    return Grid(title, (what, *columns), [*rows, ("all", *sums)], note)


def result(theme: str, tables: list[Grid], data: dict[str, Any]) -> Result:
    """Return a campaign's result as it is shown and filed."""
    environment = environment_block({}, threads=1)
    return Result(theme=theme, tables=tables, data=data, environment=environment, package="tests.campaigns")
