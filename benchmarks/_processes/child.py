"""Child processes that are asked questions and answer them.

Guarantees:

1. `ask` and `receive` return an answer or raise ChildError, within their timeout and a few seconds more. The error
   holds the end of the child's standard error; of a child that hangs, that is the stack of each of its threads.
2. After `close` there is no process.

The other side is `serve`. One JSON object a line:
    in   a question
    out  {"note": "..."}   any number, while the child works on the question
         {"answer": ...}   one for each question
"""

from __future__ import annotations

import json
import os
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO, Any

_ROOT = Path(__file__).resolve().parents[2]
_ENDING_S = 2.0  # a process may take a moment to end, and to write its stacks
_WORDS = 6000


class ChildError(RuntimeError):
    """A child process ended or gave no answer in time.

    Attributes:
        hung: whether it gave no answer in time.
        words: the end of its standard error.
    """

    def __init__(self, message: str, *, hung: bool, words: str) -> None:
        super().__init__(f"{message}; its standard error:\n{words}")
        self.hung, self.words = hung, words


class Child:
    """A process of `python -m <module> <arguments>`, which calls `serve`.

    Args:
        name: how errors call it.
        module: the module to run.
        arguments: of the command line.
        environment: its environment variables; the checkout is put first in PYTHONPATH.
    """

    def __init__(self, name: str, module: str, *arguments: str, environment: Mapping[str, str]) -> None:
        self._name = name
        path = os.pathsep.join(filter(None, [str(_ROOT), environment.get("PYTHONPATH", "")]))
        self._errors: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 - closed in `close`
        self._process = subprocess.Popen(
            [sys.executable, "-m", module, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            env={**environment, "PYTHONPATH": path},
            bufsize=0,
        )
        self._unread = b""

    @property
    def pid(self) -> int:
        """The process's number."""
        return self._process.pid

    def ask(self, question: Any, *, timeout_s: float, tell: Callable[[str], None] = lambda note: None) -> Any:
        """Send a question and wait for its answer; `tell` gets each note as it comes. Raises ChildError."""
        self.send(question)
        return self.receive(timeout_s=timeout_s, tell=tell)

    def send(self, question: Any) -> None:
        """Send a question. Raises ChildError."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(question).encode() + b"\n")
        except BrokenPipeError:
            raise self._failed("ended") from None

    def receive(self, *, timeout_s: float, tell: Callable[[str], None] = lambda note: None) -> Any:
        """Wait for the answer to the question sent; `tell` gets each note as it comes. Raises ChildError."""
        until_s = time.monotonic() + timeout_s
        while True:
            line = self._line(until_s)
            if line is None:
                raise self._failed(f"gave no answer within {timeout_s:g} s", hung=True)
            message = json.loads(line)
            if "answer" in message:
                return message["answer"]
            tell(message["note"])

    def close(self) -> None:
        """Kill the process if it still runs."""
        self._process.kill()
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout, self._errors):
            if stream is not None:
                stream.close()

    def _line(self, until_s: float) -> bytes | None:
        """The next line, or None if there is none in time."""
        assert self._process.stdout is not None
        with selectors.DefaultSelector() as selector:
            selector.register(self._process.stdout, selectors.EVENT_READ)
            while b"\n" not in self._unread:
                if not selector.select(max(0.0, until_s - time.monotonic())):
                    return None
                piece = os.read(self._process.stdout.fileno(), 1 << 20)
                if not piece:
                    raise self._failed("ended")
                self._unread += piece
        line, _, self._unread = self._unread.partition(b"\n")
        return line

    def _failed(self, how: str, *, hung: bool = False) -> ChildError:
        if hung:
            self._process.send_signal(signal.SIGUSR1)  # `serve` has it write its stacks to its standard error
        try:
            status = f"exit status {self._process.wait(_ENDING_S)}"
        except subprocess.TimeoutExpired:
            status = "still running"
        self._errors.seek(0)
        words = self._errors.read().decode(errors="replace").strip()[-_WORDS:]
        return ChildError(f"{self._name} {how} ({status})", hung=hung, words=words or "(empty)")
