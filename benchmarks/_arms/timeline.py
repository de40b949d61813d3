"""The timeline arm: a training step with the seconds of its forward and backward, and the offloader's events."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from .train import TrainArm, TrainOptions


@dataclass(frozen=True, kw_only=True)
class TimelineOptions(TrainOptions):
    """Options of the arm: `page`, the file for the offloader's report of the last step; "" writes none."""

    page: str = ""


class TimelineArm(TrainArm):
    """A `TrainArm` whose turns also return `forward_s`, `backward_s` and `events`, in seconds from the step's start."""

    options_class = TimelineOptions

    def turn(self, index: int) -> dict[str, Any]:
        answer = super().turn(index)
        answer["forward_s"], answer["backward_s"] = self._turned_s - self._begun_s, self._ended_s - self._turned_s
        answer["events"] = [
            (event.kind, event.start_s - self._begun_s, event.end_s - self._begun_s) for event in self._events
        ]
        return answer

    def step(self, *batch: Tensor) -> Tensor:
        self._begun_s = time.perf_counter()
        if self.offload is None:
            return super().step(*batch)
        with self.offload.trace() as self._events:
            return super().step(*batch)

    def turn_to_backward(self) -> None:
        self._turned_s = time.perf_counter()

    def describe(self) -> dict[str, Any]:
        self._events: list[Any] = []
        self._begun_s = self._turned_s = self._ended_s = 0.0
        self.optimizer.register_step_pre_hook(lambda *_: setattr(self, "_ended_s", time.perf_counter()))
        return super().describe()

    def close(self) -> dict[str, Any]:
        if self.options.page:
            self.offload.report(self.options.page)
        return super().close()
