"""The timeline arm: a training step with times at the borders of its blocks, and the offloader's events."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from .._processes.serve import Tell
from .train import TrainArm


class TimelineArm(TrainArm):
    """A `TrainArm` whose turns also answer `spans` (compute) and `events` (I/O), in seconds from the step's start.

    Borders come from forward hooks, and from hooks on the tensors between blocks: these fire when the tensor's gradient
    is complete, and add no node to the graph.
    """

    def __init__(self, raw: Mapping[str, Any], tell: Tell) -> None:
        super().__init__(raw, tell)
        self._spans: list[tuple[str, str, float, float]] = []
        self._events: list[Any] = []
        self._open_forward_s = self._open_backward_s = self._begun_s = 0.0
        last = len(self.model.blocks) - 1
        for number, block in enumerate(self.model.blocks):
            block.register_forward_pre_hook(self._block_begins(number))
            block.register_forward_hook(self._block_ends(number, last))

    def turn(self, index: int) -> dict[str, Any]:
        answer = super().turn(index)
        begun_s = self._begun_s
        answer["spans"] = [(phase, name, start - begun_s, end - begun_s) for phase, name, start, end in self._spans]
        answer["events"] = [
            (event.kind, event.start_s - begun_s, event.end_s - begun_s, event.nbytes, event.label)
            for event in self._events
        ]
        return answer

    def step(self, *batch: Tensor) -> Tensor:
        self._spans = []
        self._begun_s = time.perf_counter()
        if self.offload is None:
            return self._spanned_step(*batch)
        with self.offload.trace() as self._events:
            return self._spanned_step(*batch)

    def _spanned_step(self, *batch: Tensor) -> Tensor:
        self.optimizer.zero_grad(set_to_none=True)
        self._open_forward_s = time.perf_counter()
        loss: Tensor = self.model(*batch)
        self._open_backward_s = self._span("forward", "head", self._open_forward_s)
        loss.backward()  # type: ignore[no-untyped-call]  # torch has no types for it
        begun_s = self._span("backward", "embedding", self._open_backward_s)
        self.optimizer.step()
        self._span("optimizer", "optimizer", begun_s)
        return loss.detach()

    def _block_begins(self, number: int) -> Any:
        def hook(block: Any, inputs: tuple[Tensor, ...]) -> None:
            if number == 0:
                self._open_forward_s = self._span("forward", "embedding", self._open_forward_s)
            inputs[0].register_hook(lambda gradient: self._backward_passes(f"block {number}"))

        return hook

    def _block_ends(self, number: int, last: int) -> Any:
        def hook(block: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
            self._open_forward_s = self._span("forward", f"block {number}", self._open_forward_s)
            if number == last:
                output.register_hook(lambda gradient: self._backward_passes("head"))

        return hook

    def _backward_passes(self, name: str) -> None:
        self._open_backward_s = self._span("backward", name, self._open_backward_s)

    def _span(self, phase: str, name: str, begun_s: float) -> float:
        """Close a span that began at `begun_s`; return the time now."""
        now_s = time.perf_counter()
        self._spans.append((phase, name, begun_s, now_s))
        return now_s
