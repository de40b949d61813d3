"""Runner: the process that a campaign's cases run in, replaced when a case hangs or takes it along."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from benchmarks._processes.child import Child, ChildError

# The first case of a process comes after the import of torch.
_START_S = 120.0


class Runner:
    """Asks one process after another.

    Args:
        module: run by `python -m`, one compute thread, without `TBA_` settings; it calls `serve`.
        arguments: makes the command line's arguments of each new process.
        timeout_s: a case that takes longer hangs.
        variables: of the environment, beside those that are there.
    """

    def __init__(
        self,
        module: str,
        arguments: Callable[[], Sequence[str]],
        *,
        timeout_s: float,
        variables: Mapping[str, str] | None = None,
    ) -> None:
        self.timeout_s = timeout_s
        self.child: Child | None = None
        self._module, self._arguments, self._variables = module, arguments, dict(variables or {})

    def ask(self, question: Any) -> Any:
        """The answer to a question. Raises ChildError; the next question is asked of another process then."""
        timeout_s = self.timeout_s
        if self.child is None:
            environment = {name: value for name, value in os.environ.items() if not name.startswith("TBA_")}
            environment |= {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"} | self._variables
            self.child = Child("the process", self._module, *self._arguments(), environment=environment)
            timeout_s += _START_S
        try:
            return self.child.ask(question, timeout_s=timeout_s)
        except ChildError:
            self.close()
            raise

    def close(self) -> None:
        """End the process, if there is one."""
        child, self.child = self.child, None
        if child is not None:
            child.close()
