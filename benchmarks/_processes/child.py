"""Child processes that answer questions.

Guarantees:

1. `ask` and `receive` return an answer or raise ChildError, at most half a minute after their timeout. The error holds
   the end of the child's standard error; if the child hangs, that is the stack of each of its threads.
2. After `close` there is no process.

The other side is `serve`. Messages are JSON, on a separate pipe:
    in   a question
    out  {"note": "..."}   any number, while the child works on the question
         {"answer": ...}   one for each question
Standard output of the child goes to its standard error.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from multiprocessing import Pipe
from pathlib import Path
from typing import IO, Any

PIPE = "BENCHMARKS_PIPE"  # the variable that tells the child its end of the pipe
_ROOT = Path(__file__).resolve().parents[2]
_STACKS_S = 2.0  # a process that hangs takes a moment to write its stacks
_ENDING_S = 30.0  # a process that has closed its pipe ends, but slowly on a busy machine
_WORDS = 6000


class ChildError(RuntimeError):
    """A child process ended or gave no answer in time.

    Attributes:
        hung: whether it ran out of time.
        words: the end of its standard error.
    """

    def __init__(self, message: str, *, hung: bool, words: str) -> None:
        super().__init__(f"{message}; its standard error:\n{words}")
        self.hung, self.words = hung, words


class Child:
    """A process of `python -m <module> <arguments>`, which calls `serve`.

    Args:
        name: its name in errors.
        module: the module to run.
        arguments: of the command line.
        environment: its environment variables; the checkout comes first in PYTHONPATH.
    """

    def __init__(self, name: str, module: str, *arguments: str, environment: Mapping[str, str]) -> None:
        self._name = name
        path = os.pathsep.join(filter(None, [str(_ROOT), environment.get("PYTHONPATH", "")]))
        self._errors: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 - closed in `close`
        self._pipe, other = Pipe()
        with other:
            self._process = subprocess.Popen(
                [sys.executable, "-m", module, *arguments],
                stdin=subprocess.DEVNULL,
                stdout=self._errors,
                stderr=self._errors,
                env={**environment, "PYTHONPATH": path, PIPE: str(other.fileno())},
                pass_fds=[other.fileno()],
            )

    @property
    def pid(self) -> int:
        """The process's id."""
        return self._process.pid

    def ask(self, question: Any, *, timeout_s: float, tell: Callable[[str], None] = lambda note: None) -> Any:
        """Send a question and wait for its answer; `tell` gets each note as it arrives. Raises ChildError."""
        self.send(question)
        return self.receive(timeout_s=timeout_s, tell=tell)

    def send(self, question: Any) -> None:
        """Send a question. Raises ChildError."""
        try:
            self._pipe.send_bytes(json.dumps(question).encode())
        except OSError:
            raise self._failed("ended") from None

    def receive(self, *, timeout_s: float, tell: Callable[[str], None] = lambda note: None) -> Any:
        """Wait for the answer to the question sent; `tell` gets each note as it arrives. Raises ChildError."""
        until_s = time.monotonic() + timeout_s
        while True:
            if not self._pipe.poll(max(0.0, until_s - time.monotonic())):
                raise self._failed(f"gave no answer within {timeout_s:g} s", hung=True)
            try:
                message = json.loads(self._pipe.recv_bytes())
            except (EOFError, OSError):
                raise self._failed("ended") from None
            if "answer" in message:
                return message["answer"]
            tell(message["note"])

    def kill(self) -> None:
        """Kill the process, from any thread: a wait for its answer ends with ChildError."""
        self._process.kill()

    def close(self) -> None:
        """Kill the process if it still runs, and let go of its pipe and its words."""
        self._process.kill()
        self._process.wait()
        self._pipe.close()
        self._errors.close()

    def _failed(self, how: str, *, hung: bool = False) -> ChildError:
        if hung:
            self._process.send_signal(signal.SIGUSR1)  # `serve` has it write its stacks to its standard error
        try:
            status = f"exit status {self._process.wait(_STACKS_S if hung else _ENDING_S)}"
        except subprocess.TimeoutExpired:
            status = "still running"
        self._errors.seek(0)
        words = self._errors.read().decode(errors="replace").strip()[-_WORDS:]
        return ChildError(f"{self._name} {how} ({status})", hung=hung, words=words or "(empty)")
