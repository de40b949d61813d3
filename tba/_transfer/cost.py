"""Cost: what the transfers of one step cost it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Cost:
    """What transfers cost a step, by their CPU time on the threads that move them, and by waiting for them.

    A CPU second of theirs counts twice: it takes a core from a computation whose other cores then wait. Where the link
    is too slow the step waits instead, and the larger of the two costs counts.

    Attributes:
        nbytes: moved, out or back.
        cpu_s: CPU seconds that this took.
        least_cpu_s_per_byte: of the transfer that took least; so much does a further byte cost one that goes anyway.
        waited_s: seconds that forward and backward stood still for transfers.
    """

    nbytes: int = 0
    cpu_s: float = 0.0
    least_cpu_s_per_byte: float = 0.0
    waited_s: float = 0.0

    def add(self, nbytes: int, cpu_s: float) -> None:
        """Count a transfer that has ended."""
        if not nbytes:
            return
        least = self.least_cpu_s_per_byte
        self.least_cpu_s_per_byte = min(cpu_s / nbytes, least) if self.nbytes else cpu_s / nbytes
        self.nbytes += nbytes
        self.cpu_s += cpu_s

    @property
    def per_byte_s(self) -> float:
        """Seconds of the step for each byte that goes out and comes back, in a transfer of its own."""
        return 2 * max(2 * self.cpu_s, self.waited_s) / self.nbytes if self.nbytes else 0.0

    @property
    def per_further_byte_s(self) -> float:
        """Seconds of the step for each byte by which a transfer, out and back, is larger."""
        return 2 * max(2 * self.least_cpu_s_per_byte, self.waited_s / self.nbytes) if self.nbytes else 0.0
