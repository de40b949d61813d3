"""The child's side of `Child`: answers the questions that come on standard input."""

from __future__ import annotations

import faulthandler
import json
import os
import signal
import sys
from collections.abc import Callable
from typing import Any

Tell = Callable[[str], None]


def serve(answer: Callable[[Any, Tell], Any]) -> None:
    """Answer each question by `answer(question, tell)` until the parent is gone; `tell` sends a note.

    An exception ends the process, with its traceback on standard error, which the parent shows.
    """
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    # Messages get a descriptor of their own: what a library prints on standard output lands on standard error.
    with os.fdopen(os.dup(1), "w") as channel:
        os.dup2(2, 1)

        def say(kind: str, body: Any) -> None:
            channel.write(json.dumps({kind: body}) + "\n")
            channel.flush()

        for line in sys.stdin:
            say("answer", answer(json.loads(line), lambda note: say("note", note)))
