"""The fits arm: steps of a family with tier "auto", where all fits, and without it, by turns in one process.

Two processes that do alike differ by several percent of their CPU seconds, for as long as they live. What hooks that
only count cost, or such that are off, is far less, so both kinds of step are taken by one.
"""

from __future__ import annotations

import time
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from .family import FamilyArm


class FitsArm(FamilyArm):
    """A `FamilyArm` whose turn is two steps on one batch, plain and inside the context, either first by turns."""

    def turn(self, index: int) -> dict[str, Any]:
        """Take both steps; return the CPU and wall seconds of each, and the bytes moved."""
        batch = self.make_batch(index)
        found: dict[str, Any] = {}
        kinds: list[tuple[str, AbstractContextManager[Any]]] = [("plain", nullcontext()), ("fits", self._context)]
        for name, context in kinds if index % 2 == 0 else reversed(kinds):
            begun_cpu_s, begun_s = time.process_time(), time.perf_counter()
            with context:
                self.step(*batch)
            found[name] = {"cpu_s": time.process_time() - begun_cpu_s, "wall_s": time.perf_counter() - begun_s}
        stats = self._context.stats()
        return {**found, "moved_bytes": stats.written_bytes + stats.read_bytes}

    def close(self) -> dict[str, Any]:
        """Close the offloader."""
        self._context.close()
        return super().close()

    def _enter_context(self) -> Any:
        from tba import offload_context

        self._context = offload_context(self.model, tier="auto", **self.options.settings)
        return None
