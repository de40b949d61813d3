"""Greedy: decides what moves and which blocks recompute, by trying how many blocks are worth it.

For each number of recomputing blocks just enough of the rest moves for the peak to fit the budget, and the simulated
step that takes least time wins. Both are spread evenly over the step: alike layers are treated alike, writes begin with
the first layer, and reads keep an even pace, which is what a slow link needs most. Where there is
little to decide on, all plans are tried.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import chain, combinations

from .facts import Facts
from .plan import Plan
from .simulate import simulate

_FEW = 12  # storages and blocks: all plans can be tried
_TRIES = 8  # shares tried until the peak fits
_NEAR = 0.005  # share above the lower bound at which no better plan is looked for
_COARSE = 8  # numbers of blocks tried before looking closer


def decide(facts: Facts, budget_bytes: int, *, moves: bool = True, recomputes: bool = True) -> Plan:
    """Decide on a step.

    Args:
        facts: the step.
        budget_bytes: that saved tensors may hold at once.
        moves, recomputes: what is allowed.

    Returns:
        The fastest plan found that fits the budget; if none does, the one with the least peak.
    """
    nothing = make(facts, budget_bytes, frozenset(), frozenset())
    if nothing.fits:
        return nothing
    may = [number for number in range(len(facts.blocks)) if recomputes and _pays(facts, number)]
    if len(facts.movable) + len(may) <= _FEW:
        return min(_all(facts, budget_bytes, facts.movable if moves else (), may), key=_rank)
    best, enough_s = nothing, (1 + _NEAR) * nothing.bound_s
    ranks: dict[int, tuple[int, float]] = {}

    def rank(count: int) -> tuple[int, float]:
        nonlocal best
        if count not in ranks:
            recomputed = spread(may, count)
            least_s = facts.step_s + sum(facts.blocks[number].replay_s or 0.0 for number in recomputed)
            if best.fits and (best.predicted.step_s <= enough_s or least_s >= best.predicted.step_s):
                return 0, max(least_s, best.predicted.step_s)  # no better, and not worth a simulation
            plan = _moving_enough(facts, budget_bytes, recomputed, moves=moves)
            best = min(best, plan, key=_rank)
            ranks[count] = _rank(plan)
        return ranks[count]

    _search(rank, len(may))
    if not moves or (best.fits and best.predicted.step_s <= enough_s):
        return best
    # A fixed rule may be the best there is: all moves, and forward waits for it.
    return min(best, make(facts, budget_bytes, frozenset(facts.movable), frozenset()), key=_rank)


def _all(facts: Facts, budget_bytes: int, movable: Iterable[int], may: Iterable[int]) -> Iterable[Plan]:
    """Make all plans there are."""
    for recomputed in _subsets(may):
        free = [index for index in movable if facts.saved[index].place.block not in recomputed]
        for moved in _subsets(free):
            yield make(facts, budget_bytes, moved, recomputed)


def _subsets(items: Iterable[int]) -> Iterable[frozenset[int]]:
    found = list(items)
    return map(frozenset, chain.from_iterable(combinations(found, count) for count in range(len(found) + 1)))


def make(facts: Facts, budget_bytes: int, moved: frozenset[int], recomputed: frozenset[int]) -> Plan:
    """Make a plan of decisions, with what it is predicted to take."""
    return Plan(facts, budget_bytes, moved, recomputed, simulate(facts, moved, recomputed, budget_bytes))


def spread(among: Sequence[int], count: int) -> frozenset[int]:
    """Choose so many, evenly spaced from the first on; the last, of which backward has need first, only with all."""
    return frozenset(among[number * len(among) // count] for number in range(count)) if count else frozenset()


def diffuse(nbytes: Sequence[int], share: float) -> list[int]:
    """Choose positions so that up to each of them about this share of the bytes is chosen."""
    chosen, owed = [], 0.0
    for position, each in enumerate(nbytes):
        owed += share * each
        if owed >= each / 2 and owed > 0:
            chosen.append(position)
            owed -= each
    return chosen


def _search(rank: Callable[[int], tuple[int, float]], most: int) -> None:
    """Try numbers of blocks from 0 to `most`: some all over, then all between the neighbours of the best."""
    coarse = sorted({number * most // _COARSE for number in range(_COARSE + 1)})
    place = coarse.index(min(coarse, key=rank))
    low, high = coarse[max(0, place - 1)], coarse[min(len(coarse) - 1, place + 1)]
    while high - low > _COARSE:
        step = (high - low) // 4
        inner = [low, low + step, low + 2 * step, low + 3 * step, high]
        place = inner.index(min(inner, key=rank))
        low, high = inner[max(0, place - 1)], inner[min(len(inner) - 1, place + 1)]
    for count in range(low, high + 1):
        rank(count)


def _moving_enough(facts: Facts, budget_bytes: int, recomputed: frozenset[int], *, moves: bool) -> Plan:
    plan = make(facts, budget_bytes, frozenset(), recomputed)
    candidates = _movable(facts, recomputed, budget_bytes) if moves else []
    sizes = [facts.saved[index].nbytes for index in candidates]
    total, share = sum(sizes), 0.0
    best = plan
    for _ in range(_TRIES):
        missing = plan.missing_bytes
        if missing <= 0 or share >= 1 or not total:
            break
        share = min(1.0, share + 1.02 * missing / total)
        moved = frozenset(candidates[position] for position in diffuse(sizes, share))
        plan = make(facts, budget_bytes, moved, recomputed)
        best = min(best, plan, key=_rank)
    return best


def _pays(facts: Facts, number: int) -> bool:
    """Whether a block may recompute, and saves more than its input."""
    block = facts.blocks[number]
    return block.replay_s is not None and facts.block_bytes(number) > block.input_bytes


def _movable(facts: Facts, recomputed: frozenset[int], budget_bytes: int) -> list[int]:
    """List what may move, in order of forward: not what backward asks for before a write of it would be done."""
    found, late_bytes = [], 0
    window_bytes = min(facts.read_ahead_bytes, (budget_bytes - facts.largest_bytes) // 2)
    for index in reversed(facts.movable):
        each = facts.saved[index]
        if each.place.block in recomputed:
            continue
        late_bytes += each.nbytes
        if late_bytes > window_bytes:
            found.append(index)
    found.reverse()
    return found


def _rank(plan: Plan) -> tuple[int, float]:
    """Order plans: what fits before what does not, then by time, or by how far from fitting."""
    if plan.fits:
        return 0, plan.predicted.step_s
    return 1, plan.missing_bytes
