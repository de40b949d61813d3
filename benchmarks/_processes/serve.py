"""The child's side of `Child`: answers the questions that come through the pipe."""

from __future__ import annotations

import faulthandler
import json
import os
import signal
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

from .child import PIPE

Tell = Callable[[str], None]


def serve(answer: Callable[[Any, Tell], Any]) -> None:
    """Answer each question by `answer(question, tell)` until the parent is gone; `tell` sends a note.

    An exception ends the process, with its traceback on standard error, which the parent shows.
    """
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    with Connection(int(os.environ[PIPE])) as pipe:

        def say(kind: str, body: Any) -> None:
            pipe.send_bytes(json.dumps({kind: body}).encode())

        while True:
            try:
                question = json.loads(pipe.recv_bytes())
            except (EOFError, OSError):
                return
            say("answer", answer(question, lambda note: say("note", note)))
