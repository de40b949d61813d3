"""Arms that explain a step's cost: the engine without I/O, and I/O without the engine."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from io_backends import Store
from tba import OffloadConfig

from .._processes.child import Child
from .._workload.instant_store import InstantStore
from .._workload.tools import scratch_directory
from .train import TrainArm, TrainOptions

_TIMEOUT_S = 60.0
_BLOCK = 4096  # of direct I/O


@dataclass(frozen=True, kw_only=True)
class ExplainOptions(TrainOptions):
    """Options of these arms.

    Attributes:
        instant: offload to a store that ends everything at once, without bytes.
        bare_io: what another process moves beside each step: `write` and `read`, the bytes of forward and of backward,
            and the settings of `_processes.bare_io`.
    """

    instant: bool = False
    bare_io: Mapping[str, Any] | None = None


class ExplainArm(TrainArm):
    """A `TrainArm` over an instant store, or with bare I/O beside it."""

    options_class = ExplainOptions

    def describe(self) -> dict[str, Any]:
        self._beside: Child | None = None
        self._beside_cpu_s = 0.0
        if self.options.bare_io is not None:
            settings = {name: value for name, value in self.options.bare_io.items() if name not in ("write", "read")}
            directory = str(scratch_directory(OffloadConfig().storage_paths))
            self._beside = Child("the bare I/O", "benchmarks._processes.bare_io", environment=dict(os.environ))
            self._beside.ask({"directory": directory, **settings}, timeout_s=_TIMEOUT_S)
        lossy = self.options.settings.get("compress") not in (None, "exact")
        return {**super().describe(), "inexact": self.options.instant or lossy}

    def make_store(self, config: OffloadConfig) -> Store | None:
        return InstantStore() if self.options.instant else super().make_store(config)

    def step(self, *batch: Tensor) -> Tensor:
        if self._beside is None:
            return super().step(*batch)
        self._begin("write")
        loss = super().step(*batch)
        self._beside_cpu_s += self._beside.receive(timeout_s=_TIMEOUT_S)
        return loss

    def turn_to_backward(self) -> None:
        if self._beside is not None:
            self._beside_cpu_s = self._beside.receive(timeout_s=_TIMEOUT_S)
            self._begin("read")

    def turn(self, index: int) -> dict[str, Any]:
        answer = super().turn(index)
        return {**answer, "cpu_s": answer["cpu_s"] + self._beside_cpu_s}

    def close(self) -> dict[str, Any]:
        if self._beside is not None:
            self._beside.close()
        return super().close()

    def _begin(self, kind: str) -> None:
        assert self._beside is not None
        self._beside.send({kind: self.options.bare_io[kind] // _BLOCK * _BLOCK})
