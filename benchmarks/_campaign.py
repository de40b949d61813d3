"""Campaign: many cases in a process of their own, each under a watchdog, and the count of what became of them.

Guarantees:

1. Every case asked for gets an outcome: a case that does not end within `CASE_TIMEOUT_S` is "hung", one that takes the
   process with it is "wrong", both with the process's last words (for a hung one: where every thread stands). The next
   case begins in a new process.
2. When a campaign ends, however it ends, there is no process of it any more, no mount and no file.

Assumption: a case needs seconds at most, as its store's own timeout is some seconds.
"""

from __future__ import annotations

import json
import os
import selectors
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self

from ._cases import KINDS, draw
from ._small_disk import NotAllowed, small_disk
from ._trial import Outcome

_ROOT = Path(__file__).resolve().parent.parent
CASE_TIMEOUT_S = 90.0
# The first case comes after the import of torch, and a trial of each model comes before its first case.
_START_S = 120.0
# A file system of this size holds about one step of the model that fills it.
_DISK_BYTES = 16 << 20
# In the order of a table.
VERDICTS = ("exact", "raised", "wrong", "hung", "leaked", "skipped")
BAD = ("wrong", "hung", "leaked")


class Campaign:
    """Runs cases below `directory`, which is on a disk. A context manager: outside of it there is no process.

    Attributes:
        no_disk: why there is no file system that runs full, "" where there is one.
    """

    def __init__(self, directory: Path, *, timeout_s: float = CASE_TIMEOUT_S) -> None:
        self.no_disk = ""
        self._directory = directory
        self._timeout_s = timeout_s
        self._stack = ExitStack()
        self._process: _Process | None = None

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            place = tempfile.TemporaryDirectory(prefix="tba-faults-", dir=self._directory, ignore_cleanup_errors=True)
            self._place = Path(stack.enter_context(place))
            try:
                self._disk: Path | None = stack.enter_context(small_disk(self._place, _DISK_BYTES))
            except NotAllowed as reason:
                self._disk, self.no_disk = None, str(reason)
            stack.callback(self._end_process)  # first of all on the way out: it may hold files of the mount
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    def run(self, seed: int, kind: str | None = None) -> Outcome:
        """The outcome of the case of a seed; of this kind, if one is named."""
        fresh = self._process is None
        if self._process is None:
            self._process = _Process([str(path) for path in (self._new_site(), self._disk) if path is not None])
        answer = self._process.ask({"seed": seed, "kind": kind}, self._timeout_s + (_START_S if fresh else 0))
        if answer is not None:
            return Outcome(**answer)
        case = draw(seed, kind)
        hung, words = self._process.last_words()
        self._end_process()
        verdict = "hung" if hung else "wrong"
        detail = (
            f"no end within {self._timeout_s:g} s; its threads:\n{words}" if hung else f"the process died:\n{words}"
        )
        return Outcome(seed=seed, kind=case.kind, verdict=verdict, detail=detail, case=case.describe())

    def _new_site(self) -> Path:
        """An empty directory for the cases of one process: one that was killed may leave something."""
        return Path(tempfile.mkdtemp(prefix="site-", dir=self._place))

    def _end_process(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.end()
        if self._disk is not None:
            for path in list(self._disk.iterdir()):  # what a killed case left there
                shutil.rmtree(path) if path.is_dir() else path.unlink()


class _Process:
    """One process of `_trial`: a line in, a line out."""

    def __init__(self, arguments: list[str]) -> None:
        environment = {name: value for name, value in os.environ.items() if not name.startswith("TBA_")}
        environment |= {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(_ROOT), os.environ.get("PYTHONPATH", "")]))
        self._errors: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 - closed in `end`
        self._process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks._trial", *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            env=environment,
            bufsize=0,
        )

    def ask(self, question: Mapping[str, Any], timeout_s: float) -> dict[str, Any] | None:
        """The answer; None where there is none in time, or the process has ended."""
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None
        assert stdout is not None
        try:
            stdin.write(json.dumps(question).encode() + b"\n")
        except BrokenPipeError:
            return None
        text, until_s = b"", time.monotonic() + timeout_s
        with selectors.DefaultSelector() as selector:
            selector.register(stdout, selectors.EVENT_READ)
            while not text.endswith(b"\n"):
                if not selector.select(max(0.0, until_s - time.monotonic())):
                    return None
                piece = os.read(stdout.fileno(), 1 << 20)
                if not piece:
                    return None
                text += piece
        answer: dict[str, Any] = json.loads(text)
        return answer

    def last_words(self) -> tuple[bool, str]:
        """Whether the process is still there, and the end of its standard error; where it stands, if it is."""
        try:
            self._process.wait(2.0)  # one that has died may take a moment to be gone
            hung = False
        except subprocess.TimeoutExpired:
            hung = True
            self._process.send_signal(signal.SIGUSR1)  # it writes its stacks to its standard error
            time.sleep(1.0)
        self._errors.seek(0)
        return hung, self._errors.read().decode(errors="replace").strip()[-6000:] or "(nothing)"

    def end(self) -> None:
        """Kill it if it is there."""
        self._process.kill()
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout, self._errors):
            if stream is not None:
                stream.close()


def run_campaign(seeds: Iterable[int], directory: Path) -> Iterator[Outcome]:
    """The outcomes of the cases of `seeds`, as they come."""
    with Campaign(directory) as campaign:
        for seed in seeds:
            yield campaign.run(seed)


def tally(outcomes: Iterable[Outcome]) -> dict[str, Counter[str]]:
    """By kind, in the order of `KINDS`: how many of each verdict, "cases" in all, and "struck" by their fault."""
    counts = {kind: Counter[str]() for kind in KINDS}
    for outcome in outcomes:
        counts[outcome.kind].update(["cases", outcome.verdict, *(["struck"] if outcome.struck else [])])
    return counts
