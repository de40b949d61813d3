"""Prefix: the rule of TBA/SSDTrain (arXiv 2408.10013), as its code has it: a baseline to measure against.

The first blocks move whole, the rest stays. Blocks are taken in order of forward; one more moves as long as the link
could write all of those before it, and both write and read it, within three times the forward's time less twice what
the blocks before it took: backward is taken to last twice as long as forward. Memory does not enter.
"""

from __future__ import annotations

from .facts import Facts
from .greedy import make
from .plan import Plan


def prefix(facts: Facts, budget_bytes: int) -> Plan:
    """Decide on a step as TBA/SSDTrain does; `budget_bytes` is only compared with the peak."""
    moved: list[int] = []
    before_bytes = 0
    rate = facts.link.write_bytes_per_s
    for number, block in enumerate(facts.blocks):
        nbytes = facts.block_bytes(number)
        time_s = 3 * facts.forward_s - 2 * block.begin_s
        if before_bytes + 2 * nbytes > rate * time_s:
            break
        before_bytes += nbytes
        moved += facts.by_block.get(number, [])
    return make(facts, budget_bytes, frozenset(moved), frozenset())
