"""A child process for tests of `Child` and `Runner`: it does what it is asked to, and imports next to nothing."""

from __future__ import annotations

import os
import time
from typing import Any

from benchmarks._processes.serve import Tell, serve


def answer(question: Any, tell: Tell) -> Any:
    """Hang, die, fail or print where the question says so; note it, and answer with it and the process's number."""
    print("this is no answer")
    match question:
        case "hang":
            time.sleep(600)
        case "die":
            os._exit(3)
        case "fail":
            raise ValueError("the child's own words")
    tell(f"asked {question}")
    return question, os.getpid()


if __name__ == "__main__":
    serve(answer)
