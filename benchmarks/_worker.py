"""The inside of an arm's process: builds the arm it is told to, then takes a turn for every line on standard input.

`python -m benchmarks._worker` is started by `_processes`. One JSON object a line:
    in   {"role": "train", "options": {...}}   once, first
         {"turn": 3}                           as often as there are rounds
         {"close": true}                       last
    out  {"ready": {...}} | {"turn": {...}} | {"closed": {...}}
Whatever goes wrong ends the process with its traceback on standard error, which the other side reads and shows.
"""

from __future__ import annotations

import faulthandler
import json
import os
import signal
import sys
from typing import Any, Protocol, TextIO


class Arm(Protocol):
    """What a role is: something that takes turns and answers each with numbers."""

    def ready(self) -> dict[str, Any]: ...

    def turn(self, index: int) -> dict[str, Any]: ...

    def close(self) -> dict[str, Any]: ...


def make_arm(role: str, options: dict[str, Any]) -> Arm:
    """The arm of this role; its options are the fields of the role's options class."""
    if role == "train":
        from ._train import TrainArm, TrainOptions

        return TrainArm(TrainOptions(**options))
    if role == "timeline":
        from ._timeline import TimelineArm
        from ._train import TrainOptions

        return TimelineArm(TrainOptions(**options))
    if role == "hooks":
        from ._hook_cost import HookArm, HookOptions

        return HookArm(HookOptions(**options))
    raise ValueError(f"unknown role {role!r}; known are train, timeline, hooks")


def _answer(channel: TextIO, kind: str, body: dict[str, Any]) -> None:
    channel.write(json.dumps({kind: body}) + "\n")
    channel.flush()


def main() -> None:
    """Serve until told to close, or until the other side is gone."""
    # The other side asks an arm that hangs where it stands, so that the error can say so.
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    # Answers get a descriptor of their own: whatever a library prints on standard output lands on standard error.
    channel = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    first = json.loads(sys.stdin.readline())
    arm = make_arm(first["role"], first["options"])
    _answer(channel, "ready", arm.ready())
    for line in sys.stdin:
        message = json.loads(line)
        if "close" in message:
            _answer(channel, "closed", arm.close())
            return
        _answer(channel, "turn", arm.turn(message["turn"]))


if __name__ == "__main__":
    main()
