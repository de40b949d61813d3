"""Campaign: many cases in a process of their own, each under a watchdog, and the count of their outcomes.

Guarantees:

1. Every case asked for gets an outcome: a case that does not end within `CASE_TIMEOUT_S` is "hung", one that takes the
   process with it is "wrong", both with the process's last words (of a hung one, the stack of every thread). The next
   case begins in a new process.
2. When a campaign ends, however it ends, no process, mount or file of it is left.

Assumption: a case needs seconds at most, as its store's own timeout is some seconds.
"""

from __future__ import annotations

import shutil
import tempfile
from collections import Counter
from collections.abc import Iterable
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Self

from benchmarks._processes.child import ChildError

from ..runner import Runner
from .cases import KINDS, draw
from .small_disk import NotAllowed, small_disk
from .trial import Outcome

CASE_TIMEOUT_S = 90.0
# A file system of this size holds about one step of the model that fills it.
_DISK_BYTES = 16 << 20
# In the order of a table.
VERDICTS = ("exact", "raised", "wrong", "hung", "leaked", "skipped")
BAD = ("wrong", "hung", "leaked")


class Campaign:
    """Runs cases below `directory`, which is on a disk. A context manager: there is no process outside of it.

    Attributes:
        no_disk: why there is no file system that runs full, "" where there is one.
    """

    def __init__(self, directory: Path, *, timeout_s: float = CASE_TIMEOUT_S) -> None:
        self.no_disk = ""
        self.runner = Runner("tests.campaigns.faults.trial", self._arguments, timeout_s=timeout_s)
        self._directory = directory
        self._disk: Path | None = None
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            place = tempfile.TemporaryDirectory(prefix="tba-faults-", dir=self._directory, ignore_cleanup_errors=True)
            self._place = Path(stack.enter_context(place))
            try:
                self._disk = stack.enter_context(small_disk(self._place, _DISK_BYTES))
            except NotAllowed as reason:
                self.no_disk = str(reason)
            stack.callback(self.runner.close)  # first of all on the way out: it may hold files of the mount
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    def run(self, seed: int, kind: str | None = None) -> Outcome:
        """Run the case of a seed, of this kind if one is named."""
        try:
            return Outcome(**self.runner.ask({"seed": seed, "kind": kind}))
        except ChildError as error:
            self._empty_disk()
            case, verdict = draw(seed, kind), "hung" if error.hung else "wrong"
            return Outcome(seed=seed, kind=case.kind, verdict=verdict, detail=str(error), case=case.describe())

    def _arguments(self) -> list[str]:
        """Make an empty directory for each process, since a killed one may leave files; add the small disk."""
        site = tempfile.mkdtemp(prefix="site-", dir=self._place)
        return [str(path) for path in (site, self._disk) if path is not None]

    def _empty_disk(self) -> None:
        """Delete what a killed case left on the small disk."""
        for path in [] if self._disk is None else list(self._disk.iterdir()):
            shutil.rmtree(path) if path.is_dir() else path.unlink()


def tally(outcomes: Iterable[Outcome]) -> dict[str, Counter[str]]:
    """Count by kind, in the order of `KINDS`: each verdict, "cases" in all, and "struck" by their fault."""
    counts = {kind: Counter[str]() for kind in KINDS}
    for outcome in outcomes:
        counts[outcome.kind].update(["cases", outcome.verdict, *(["struck"] if outcome.struck else [])])
    return counts
