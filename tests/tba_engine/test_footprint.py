"""What a step is said to have held: each tensor once, whatever the hooks did in it."""

from __future__ import annotations

from tba._auto.acted import Acted
from tba._engine.footprint import Footprint
from tba._memory.ledger import Peaks
from tba._plan import policy
from tba._stats import Counters


def test_what_a_compiled_graph_keeps_counts_once_in_full_steps_and_in_light_ones() -> None:
    counters = Counters()
    footprint = Footprint(counters, compresses=False)
    small_bytes, whole_bytes, moved_bytes = 3, 500, 20
    counters.kept_by_reason["below min_tensor_bytes"] += small_bytes
    counters.kept_by_reason[policy.WHOLE] += whole_bytes
    footprint.end_micro_batch(Peaks(2 * moved_bytes, moved_bytes), Acted(), light=False, first=True)
    assert footprint.held_bytes == moved_bytes + small_bytes + whole_bytes
    assert footprint.plain_bytes == 2 * moved_bytes + small_bytes + whole_bytes
    # Where hooks only count they see what the graph keeps, and not what is small.
    counters.kept_by_reason[policy.FITS] += whole_bytes
    footprint.end_micro_batch(Peaks(whole_bytes, whole_bytes), Acted(), light=True, first=True)
    assert footprint.held_bytes == footprint.plain_bytes == whole_bytes + small_bytes
