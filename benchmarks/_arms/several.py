"""Several arms in one process, which take turns in it.

Two processes that do the same differ by up to a tenth for as long as they live, which hides costs of a few percent.
Arms of one process share its memory: their times can be compared, their peaks cannot. Each has a thread of its own, as
PyTorch keeps hooks by thread.
"""

from __future__ import annotations

import random
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from .._processes.arms import SETTLE_S
from .._processes.serve import Tell
from .family import FamilyArm


class SeveralArms:
    """Arms that train a family each, on the same batches; `turn(i)` is the step of every one on batch `i`.

    Options: `arms`, the options of each `FamilyArm` by name.
    """

    def __init__(self, raw: Mapping[str, Any], tell: Tell) -> None:
        self._arms: dict[str, tuple[ThreadPoolExecutor, FamilyArm]] = {}
        for name, options in raw["arms"].items():
            thread = ThreadPoolExecutor(1)
            self._arms[name] = thread, thread.submit(FamilyArm, options, tell).result()
        self.about = {name: arm.about for name, (_, arm) in self._arms.items()}

    def turn(self, index: int) -> dict[str, Any]:
        """Take a step of each arm, in an order drawn for this turn; return their answers by name.

        In a fixed order, or that reversed, an arm would follow the same one each time, or itself: what an arm leaves in
        caches and in the allocator helps the next step of the same kind.
        """
        answers = {}
        for name in random.Random(index).sample(list(self._arms), len(self._arms)):
            thread, arm = self._arms[name]
            answers[name] = thread.submit(arm.turn, index).result()
            time.sleep(SETTLE_S)
        return answers

    def close(self) -> dict[str, Any]:
        final = {name: thread.submit(arm.close).result() for name, (thread, arm) in self._arms.items()}
        for thread, _ in self._arms.values():
            thread.shutdown()
        return final
