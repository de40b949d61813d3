"""Worker: builds the arm of a role in its own process and lets it take turns, or runs a role that answers once.

`python -m benchmarks._arms.worker` is started by `_processes.arms`. Its questions:
    {"role": "train", "options": {...}}   once, first
    {"turn": 3}                           of an arm with turns: one for each round
    {"close": true}                       last
"""

from __future__ import annotations

from importlib import import_module
from typing import Any, Protocol

from .._processes.serve import Tell, serve

# Where a role is: called with its options and `tell`, it answers once, or returns an Arm.
ROLES = {
    "train": "train:TrainArm",
    "timeline": "timeline:TimelineArm",
    "hooks": "hook_cost:HookArm",
    "codec": "codec_speed:measure_codecs",
    "linear": "codec_speed:measure_linear",
    "block": "stored_bytes:measure_block",
    "fidelity": "fidelity:train_arm",
    "bert": "bert:BertArm",
}


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
            made = self._make(question["role"], question["options"], tell)
            if isinstance(made, dict):
                return made
            self._arm = made
            return made.about
        return self._arm.turn(question["turn"]) if "turn" in question else self._arm.close()

    def _make(self, role: str, options: dict[str, Any], tell: Tell) -> Any:
        if role not in ROLES:
            raise ValueError(f"unknown role {role!r}; known are {', '.join(ROLES)}")
        module, _, name = ROLES[role].partition(":")
        return getattr(import_module(f".{module}", __package__), name)(options, tell)


if __name__ == "__main__":
    serve(Worker().answer)
