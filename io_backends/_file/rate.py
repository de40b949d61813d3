"""Rate limit: a token bucket that makes a fast device behave like a slow one, for experiments and for sharing."""

from __future__ import annotations

import threading
import time

# What may pass at once after a pause. Sleeping is late by a fraction of a millisecond each time and transfers take
# time of their own; without some credit the rate reached would lie far below the one asked for.
BURST_S = 0.02
# A transfer under a limit goes in pieces of at most this time and size, so that the limit acts within it. Each piece
# wakes a worker, which takes a core from what computes: small ones would cost a step what no slow disk does.
_PIECE_S = 0.1
_PIECE_BYTES = 16 << 20


class RateLimit:
    """Bytes passed never exceed `bytes_per_s` times the time gone by, and `BURST_S` of it more. Thread-safe.

    Attributes:
        piece_bytes: what to ask for at a time, a multiple of 4096.
    """

    def __init__(self, bytes_per_s: float) -> None:
        if not bytes_per_s > 0:
            raise ValueError(f"a rate must be positive, got {bytes_per_s} bytes per second")
        self._bytes_per_s = bytes_per_s
        self._full_at_s = float("-inf")  # when all that was asked for has passed
        self._lock = threading.Lock()
        self.piece_bytes = max(4096, int(min(_PIECE_BYTES, bytes_per_s * _PIECE_S)) // 4096 * 4096)

    def pace(self, nbytes: int) -> None:
        """Reserve the link for `nbytes` and sleep until they would have passed."""
        with self._lock:
            self._full_at_s = max(self._full_at_s, time.monotonic() - BURST_S) + nbytes / self._bytes_per_s
            until_s = self._full_at_s
        time.sleep(max(0.0, until_s - time.monotonic()))
