"""The child's side of `Child`: answers the questions that arrive on the pipe."""

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
    """Answer each question by `answer(question, tell)` until the parent has gone; `tell` sends a note.

    An exception ends the process; the parent shows its traceback.
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
