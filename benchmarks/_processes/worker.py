"""Worker: builds the arm of a role in its own process and lets it take turns, or runs a role that answers once.

`python -m benchmarks._processes.worker` is started by `arms`. Its questions:
    {"role": "train:TrainArm", "options": {...}}   once, first: the module of `_arms` and the name in it
    {"turn": 3}                                    of an arm with turns: one for each round
    {"close": true}                                last
Called with its options and `tell`, a role answers once, or returns an Arm.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any, Protocol

from .serve import Tell, serve


class Arm(Protocol):
    """A role with turns; `about` describes it, `turn` returns figures, `close` the last ones."""

    about: dict[str, Any]

    def turn(self, index: int) -> dict[str, Any]: ...

    def close(self) -> dict[str, Any]: ...


class Worker:
    """Answers the questions that one arm is asked."""

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
