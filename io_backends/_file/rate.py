"""Rate limit: a token bucket that makes a fast device act like a slow one, for experiments and for sharing."""

from __future__ import annotations

import threading
import time

# Credit after a pause. Sleeps overrun by a fraction of a millisecond and transfers take time, so without credit the
# actual rate would be far below the limit.
BURST_S = 0.02
# A limited transfer goes in pieces of at most this time and size. Each piece wakes a worker, which takes a core from
# computation: small pieces would cost a step more than a slow disk does.
_PIECE_S = 0.1
_PIECE_BYTES = 16 << 20


class RateLimit:
    """Passes at most `bytes_per_s` times the elapsed time, plus `BURST_S` of it. Thread-safe.

    Attributes:
        piece_bytes: how much to request at a time, a multiple of 4096.
    """

    def __init__(self, bytes_per_s: float) -> None:
        if not bytes_per_s > 0:
            raise ValueError(f"a rate must be positive, got {bytes_per_s} bytes per second")
        self._bytes_per_s = bytes_per_s
        self._full_at_s = float("-inf")  # when all reserved bytes have passed
        self._lock = threading.Lock()
        self.piece_bytes = max(4096, int(min(_PIECE_BYTES, bytes_per_s * _PIECE_S)) // 4096 * 4096)

    def pace(self, nbytes: int) -> None:
        """Reserve the link for `nbytes`, and sleep until they would have passed."""
        with self._lock:
            self._full_at_s = max(self._full_at_s, time.monotonic() - BURST_S) + nbytes / self._bytes_per_s
            until_s = self._full_at_s
        time.sleep(max(0.0, until_s - time.monotonic()))
