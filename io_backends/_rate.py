"""Rate limit: a token bucket that makes a fast device behave like a slow one, for experiments."""

from __future__ import annotations

import threading
import time

# Pieces are short against a tensor's transfer, so that the limit acts within a transfer and not only after it.
PIECE_BYTES = 1 << 20


class RateLimit:
    """`pace(nbytes)` sleeps so that bytes passed never exceed `bytes_per_s` times the time gone by. Thread-safe."""

    def __init__(self, bytes_per_s: float) -> None:
        if not bytes_per_s > 0:
            raise ValueError(f"a rate must be positive, got {bytes_per_s} bytes per second")
        self._bytes_per_s = bytes_per_s
        self._free_at_s = 0.0
        self._lock = threading.Lock()

    def pace(self, nbytes: int) -> None:
        """Reserve the link for `nbytes` and sleep until they would have passed."""
        with self._lock:
            self._free_at_s = max(self._free_at_s, time.monotonic()) + nbytes / self._bytes_per_s
            until_s = self._free_at_s
        time.sleep(max(0.0, until_s - time.monotonic()))
