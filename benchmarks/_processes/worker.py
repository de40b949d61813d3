"""Worker: builds the arm of a role in its own process and runs its turns, or runs a role that answers once.

`arms` starts `python -m benchmarks._processes.worker`. Its questions:
    {"role": "train:TrainArm", "options": {...}}   once, first: a module of `_arms` and a name in it
    {"turn": 3}                                    for an arm with turns: one for each round
    {"close": true}                                last
A role is called with its options and `tell`; it returns its answer, or an Arm.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any, Protocol

from .serve import Tell, serve


class Arm(Protocol):
    """A role with turns; `about` describes it, `turn` returns figures, `close` the final ones."""

    about: dict[str, Any]

    def turn(self, index: int) -> dict[str, Any]: ...

    def close(self) -> dict[str, Any]: ...


class Worker:
    """Answers the questions to one arm."""

    def __init__(self) -> None:
        self._arm: Arm | None = None

    def answer(self, question: dict[str, Any], tell: Tell) -> dict[str, Any]:
        """Answer one question."""
        if self._arm is None:
            module, _, name = question["role"].partition(":")
            made = getattr(import_module(f"benchmarks._arms.{module}"), name)(question["options"], tell)
            if isinstance(made, dict):
                return made
            self._arm = made
            return made.about
        return self._arm.turn(question["turn"]) if "turn" in question else self._arm.close()


if __name__ == "__main__":
    serve(Worker().answer)
