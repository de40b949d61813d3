"""Runner: asks the cases of a campaign in processes of their own, with a time limit, and counts what comes of them."""

from __future__ import annotations

import os
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any, TypeVar

from benchmarks._processes.child import Child, ChildError
from benchmarks._report.environment import environment_block
from benchmarks._report.progress import progress
from benchmarks._report.results import Grid, Result
from benchmarks._workload.tools import scratch_directory

_START_S = 120.0  # the first case of a process comes after the import of torch

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
    parent = scratch_directory((path,) if path is not None else None)
    place = tempfile.TemporaryDirectory(prefix=f"tba-{theme}-", dir=parent, ignore_cleanup_errors=True)
    with place as directory, progress(theme, len(questions)) as bar, ThreadPoolExecutor(jobs) as pool:

        def run(begin: int) -> None:
            module = f"tests.campaigns.{theme}.worker"
            with closing(Runner(module, lambda: arguments(directory), timeout_s=timeout_s, variables=variables)) as one:
                for number in range(begin, min(begin + chunk, len(questions))):
                    try:
                        answer = one.ask(questions[number])
                    except ChildError as error:
                        answer = error
                    found[number] = outcome(questions[number], answer)
                    if said := bad(found[number]):
                        bar.say(said)
                    bar.advance(f"{sum(bool(bad(each)) for each in list(found.values()))} bad")
                    if stopped.is_set():
                        return

        try:
            list(pool.map(run, range(0, len(questions), chunk)))
        finally:
            stopped.set()
    return [found[number] for number in sorted(found)]


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
