"""Greedy: decides what moves and which blocks recompute, by trying how many blocks are worth it.

For each number of recomputing blocks just enough of the rest moves for the peak to fit the budget, and more where that
is faster; the simulated step that takes least time wins. Numbers are tried in the order of what such a step takes at
least, so most never are. Blocks and what moves are spread evenly over the step: alike layers are treated alike, writes
begin with the first layer, and reads keep an even pace, which is what a slow link needs most. Where there is little to
decide on, all plans are tried.

Parts of a block are alike too: all MLPs, or all attention. Some of one kind recompute; or all of one kind and some of
another, which are blocks or other parts. A block that recomputes takes the place of its parts.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain, combinations

from .._memory.ledger import held_limit_bytes
from .bound import gone_bytes, least_s
from .facts import Facts
from .plan import Plan
from .simulate import simulate

_FEW = 12  # storages and blocks: all plans can be tried
_TRIES = 12  # shares tried until the peak fits
_NEAR = 0.01  # share above the lower bound at which no better plan is looked for
_PATIENCE = 5  # choices of blocks tried in a row that give no better plan
_ALIKE = 0.999  # of the step that evenly spread blocks take: a choice that takes less is looked at
_COARSE = 32  # at most so many numbers of blocks are tried where nothing fits
# Times as long as one that derives, up to which a plan that does not is taken: at equal predictions, steps that derived
# beside moving took 3 to 6% longer (a residual network).
_DERIVES = 1.03
_PARTS = 8  # of what may be derived: more and more of them are tried, with as much moved as still has to

_Ladder = tuple[list[int], list[int]]  # what recomputes all, and what is alike, of which some do
_Way = tuple[int, ...]  # of choosing blocks: whether by what they cost, and among which


def decide(facts: Facts, budget_bytes: int, *, moves: bool = True, recomputes: bool = True) -> Plan:
    """Decide on a step.

    Args:
        facts: the step.
        budget_bytes: that saved tensors may hold at once.
        moves, recomputes: what is allowed.

    Returns:
        The fastest plan found that fits the budget; if none does, the one with the least peak. None exceeds the cap.
    """
    best = _best(facts, budget_bytes, moves=moves, recomputes=recomputes)
    if not (best.fits and (best.idle or _is_near(best, best.bound_s))):
        others = [
            _deriving(facts, budget_bytes, derived, moves=moves, recomputes=recomputes)
            for derived in _derived(facts, budget_bytes)
        ]
        others += [_moving_beside(facts, budget_bytes, derived, moves=moves) for derived in _more_and_more(facts)]
        best = _worth_deriving(best, min(others, key=_rank, default=best))
    return replace(best, decide=partial(decide, moves=moves, recomputes=recomputes))


def decide_moves(facts: Facts, budget_bytes: int, recomputed: frozenset[int]) -> Plan:
    """Decide what moves where it is settled which blocks recompute."""
    again = facts.again(recomputed)
    everything = frozenset(index for index in facts.movable if facts.saved[index].place not in again)
    everything |= frozenset(facts.inputs(recomputed))
    fixed = make(facts, budget_bytes, everything, recomputed)
    best = min(_moving_enough(facts, budget_bytes, recomputed, moves=True), fixed, key=_rank)
    return replace(best, decide=partial(decide_moves, recomputed=recomputed))


def fitting(decide: Callable[[Facts, int], Plan], facts: Facts, budget_bytes: int) -> Plan:
    """Decide on a step that may run compiled code.

    That asks for all of a graph at once, and holds it to the end, so that no plan fits. It is carried out as if it did
    not: the rule beneath holds what the engine itself has in memory.
    """
    plan = decide(facts, budget_bytes)
    if plan.fits:
        return plan
    at_best = decide(facts.at_best(), budget_bytes)
    return at_best if at_best.fits else plan


def _derived(facts: Facts, budget_bytes: int) -> list[frozenset[int]]:
    """List what may be derived, the cheapest a byte first: just enough, what costs less than blocks, and all."""
    may = facts.derivable
    nothing: frozenset[int] = frozenset()

    def fits(count: int) -> bool:
        return make(facts, budget_bytes, nothing, nothing, frozenset(may[:count])).fits

    def dear(index: int) -> bool:
        return (facts.saved[index].derive_s or 0.0) / facts.saved[index].nbytes > replay_s

    blocks = [number for number in range(len(facts.blocks)) if _pays(facts, number)]
    costs = ((facts.blocks[number].replay_s or 0.0) / facts.block_bytes(number) for number in blocks)
    replay_s = min(costs, default=0.0)
    counts = (bisect_left(range(len(may)), True, key=fits), bisect_left(may, True, key=dear), len(may))
    return [frozenset(may[:count]) for count in dict.fromkeys(counts) if count]


def _worth_deriving(plan: Plan, derives: Plan) -> Plan:
    """Return the one that `derives` if it is better by more than the model errs about it, else the plan without."""
    near = plan.fits and plan.predicted.step_s <= _DERIVES * derives.predicted.step_s
    return plan if near else min(plan, derives, key=_rank)


def _more_and_more(facts: Facts) -> list[frozenset[int]]:
    """List what may be derived in growing parts, the cheapest a byte first."""
    may = facts.derivable
    counts = dict.fromkeys(len(may) * part // _PARTS for part in range(1, _PARTS + 1))
    return [frozenset(may[:count]) for count in counts if count]


def _deriving(facts: Facts, budget_bytes: int, derived: frozenset[int], *, moves: bool, recomputes: bool) -> Plan:
    """Decide on a step in which these are derived, unless they or their sources are in blocks that recompute."""
    best = _best(facts.deriving(derived), budget_bytes, moves=moves, recomputes=recomputes)
    again = facts.again(best.recomputed)

    def stays(index: int) -> bool:
        each = facts.saved[index]
        return not any(place in again for place in (each.place, *each.sources))

    left = frozenset(filter(stays, derived))
    plan = make(facts, budget_bytes, best.moved, best.recomputed, left)
    if left == derived or plan.fits:
        return plan
    return min(plan, _moving_beside(facts, budget_bytes, left, best.recomputed, moves=moves), key=_rank)


def _moving_beside(
    facts: Facts,
    budget_bytes: int,
    derived: frozenset[int],
    recomputed: frozenset[int] = frozenset(),
    *,
    moves: bool,
) -> Plan:
    """Decide what moves where it is settled what is derived and what recomputes."""
    plan = _moving_enough(facts.deriving(derived), budget_bytes, recomputed, moves=moves)
    return replace(plan, facts=facts, derived=derived)  # simulated as it is


def _best(facts: Facts, budget_bytes: int, *, moves: bool, recomputes: bool) -> Plan:
    nothing = make(facts, budget_bytes, frozenset(), frozenset())
    if nothing.fits:
        return nothing
    may = [number for number in range(len(facts.blocks)) if recomputes and _pays(facts, number)]
    if len(facts.movable) + len(may) <= _FEW:
        return min(_all(facts, budget_bytes, facts.movable if moves else (), may), key=_rank)
    bound_s = nothing.bound_s
    whole, *beside = _ladders(facts, may)
    best = nothing
    # Whole blocks first, as if there were no parts: parts then never make a plan slower.
    for ladders in ([whole], beside):
        best = _search(best, ladders, bound_s, moves=moves)
    hand = [each for each in by_hand(facts, may) if moves or not each[0]]
    others = [make(facts, budget_bytes, *each) for each in hand if _may_beat(best, each[1], moves=bool(each[0]))]
    if moves and _may_beat(best, frozenset(), moves=True) and not _is_near(best, bound_s):
        others.append(_moving_enough(facts, budget_bytes, frozenset(), moves=True))
    return min((best, *others), key=_rank)


def _may_beat(best: Plan, recomputed: frozenset[int], *, moves: bool) -> bool:
    """Whether a plan by which these recompute may be better, by what it takes at least."""
    least, written_bytes = _least(best.facts, best.budget_bytes, recomputed)
    return not best.fits or (least < best.predicted.step_s and (moves or not written_bytes))


def _is_near(plan: Plan, bound_s: float) -> bool:
    return plan.fits and plan.predicted.step_s <= (1 + _NEAR) * bound_s


def _search(best: Plan, ladders: Sequence[_Ladder], bound_s: float, *, moves: bool) -> Plan:
    """Look for a better plan than this one, until no choice can be better or several in a row were not."""
    facts, budget_bytes = best.facts, best.budget_bytes
    apart = max((len(alike) // _COARSE for _, alike in ladders), default=0)
    in_vain = 0
    tried: list[tuple[_Way, int]] = []
    for least, way, blocks in _choices(facts, budget_bytes, ladders, moves=moves):
        if _is_near(best, bound_s) or (best.fits and in_vain > _PATIENCE):
            break
        if best.fits and least >= best.predicted.step_s:
            continue
        count = len(blocks)
        if not best.fits and any(way == was and abs(count - other) < apart for was, other in tried):
            continue
        tried.append((way, count))
        plan = _moving_enough(facts, budget_bytes, blocks, moves=moves)
        better = _rank(plan) < _rank(best)
        in_vain = 0 if better else in_vain + 1
        best = plan if better else best
    return best


def by_hand(facts: Facts, may: Iterable[int]) -> list[tuple[frozenset[int], frozenset[int]]]:
    """List what a user would do without a plan: what moves, and which of those that may recompute.

    Everything moves; or all blocks recompute, every other one, parts of one kind, or all parts but one kind; or all
    blocks recompute, and their inputs move.
    """
    nothing, allowed = frozenset[int](), frozenset(may)
    whole, *parts = facts.kinds.values()
    without = [[number for other in parts if other is not alike for number in other] for alike in parts]
    recomputed = dict.fromkeys(allowed.intersection(each) for each in (whole, whole[::2], *parts, *without))
    inputs = frozenset(facts.inputs(allowed.intersection(whole)))
    return [
        (frozenset(facts.movable), nothing),
        *((nothing, each) for each in recomputed if each),
        *([(inputs, allowed.intersection(whole))] if inputs else []),
    ]


def _choices(
    facts: Facts, budget_bytes: int, ladders: Iterable[_Ladder], *, moves: bool
) -> list[tuple[float, _Way, frozenset[int]]]:
    """List which blocks and parts may recompute, each with a lower bound of the step; the most promising first.

    Of each number there are those spread evenly and those that cost least a byte.
    """
    most_bytes = facts.most_moved_bytes if moves else 0
    found: list[tuple[float, _Way, frozenset[int]]] = []
    for base, alike in ladders:
        cheapest = sorted(alike, key=lambda number: (facts.blocks[number].replay_s or 0.0) / facts.block_bytes(number))
        for count in range(bool(base), len(alike) + 1):
            even_s = math.inf
            for costs, chosen in enumerate((spread(alike, count), frozenset(cheapest[:count]))):
                blocks = chosen.union(number for number in base if facts.blocks[number].within not in chosen)
                least, written_bytes = _least(facts, budget_bytes, blocks)
                if costs and least >= _ALIKE * even_s:
                    continue  # alike blocks are treated alike
                if written_bytes <= most_bytes or count == len(alike):
                    even_s = least
                    found.append((least, (costs, *base[:1], *alike[:1]), blocks))
    # Evenly spread ones first, unless another choice could win by more than `_NEAR`: timings of alike blocks vary.
    return sorted(found, key=lambda choice: (choice[0] * (1 + _NEAR * choice[1][0]), choice[1]))


def _least(facts: Facts, budget_bytes: int, recomputed: Iterable[int]) -> tuple[float, int]:
    """Return the least seconds of a step that fits and in which these recompute, and the bytes it must write."""
    blocks = list(recomputed)
    written_bytes = gone_bytes(facts, budget_bytes, blocks)
    return least_s(facts, written_bytes, sum(facts.blocks[number].replay_s or 0.0 for number in blocks)), written_bytes


def _ladders(facts: Facts, may: Sequence[int]) -> list[_Ladder]:
    """List what is alike and may recompute, each beside nothing and beside all parts of another kind."""
    allowed = set(may)
    kinds = [[number for number in alike if number in allowed] for alike in facts.kinds.values()]
    blocks, *parts = kinds
    beside = [(base, alike) for base in parts for alike in kinds if base and alike and alike is not base]
    return [([], blocks), *(([], alike) for alike in parts if alike), *beside]


def _all(facts: Facts, budget_bytes: int, movable: Sequence[int], may: Iterable[int]) -> Iterable[Plan]:
    """Make all plans there are."""
    for recomputed in _subsets(may):
        if any(facts.blocks[number].within in recomputed for number in recomputed):
            continue
        again = facts.again(recomputed)
        free = [index for index in movable if facts.saved[index].place not in again]
        free += facts.inputs(recomputed) if movable else []
        for moved in _subsets(free):
            yield make(facts, budget_bytes, moved, recomputed)


def _subsets(items: Iterable[int]) -> Iterable[frozenset[int]]:
    found = list(items)
    return map(frozenset, chain.from_iterable(combinations(found, count) for count in range(len(found) + 1)))


def make(
    facts: Facts,
    budget_bytes: int,
    moved: frozenset[int],
    recomputed: frozenset[int],
    derived: frozenset[int] = frozenset(),
) -> Plan:
    """Make a plan of decisions, with what it is predicted to take."""
    predicted = simulate(facts.deriving(derived), moved, recomputed, budget_bytes)
    return Plan(facts, budget_bytes, moved, recomputed, predicted, derived=derived)


def spread(among: Sequence[int], count: int) -> frozenset[int]:
    """Choose so many, evenly spaced from the first on; the last, of which backward has need first, only with all."""
    return frozenset(among[number * len(among) // count] for number in range(count)) if count else frozenset()


def diffuse(nbytes: Sequence[int], share: float, most_bytes: int = 1 << 62) -> list[int]:
    """Choose positions so that up to each of them about this share of the bytes is chosen, and `most_bytes` in all."""
    chosen, owed = [], 0.0
    for position, each in enumerate(nbytes):
        owed += share * each
        if owed >= each / 2 and owed > 0 and each <= most_bytes:
            chosen.append(position)
            owed -= each
            most_bytes -= each
    return chosen


def _moving_enough(facts: Facts, budget_bytes: int, recomputed: frozenset[int], *, moves: bool) -> Plan:
    """Move just as much as the budget asks for, and then more, as long as that makes the step faster.

    Inputs of blocks that recompute move where all else is not enough.
    """
    if not moves:
        return _enough_of([], facts, budget_bytes, recomputed)
    plan = _enough_of(movable(facts, recomputed, budget_bytes), facts, budget_bytes, recomputed)
    if plan.missing_bytes <= 0 or not (inputs := facts.inputs(recomputed)):
        return plan
    more = movable(facts, recomputed, budget_bytes, inputs)
    return min(plan, _enough_of(more, facts, budget_bytes, recomputed), key=_rank)


def _enough_of(candidates: Sequence[int], facts: Facts, budget_bytes: int, recomputed: frozenset[int]) -> Plan:
    """Move as much of these as `_moving_enough` says."""
    sizes = [facts.at(index).nbytes for index in candidates]
    most_bytes = min(sum(sizes), facts.most_moved_bytes)

    def moving(nbytes: float) -> Plan:
        moved = diffuse(sizes, nbytes / max(1, sum(sizes)), most_bytes)
        return make(facts, budget_bytes, frozenset(candidates[position] for position in moved), recomputed)

    # The bytes held at the end of forward give a lower bound without a simulation.
    over_bytes = gone_bytes(facts, held_limit_bytes(budget_bytes, facts.largest_bytes), recomputed)
    nbytes: float = min(most_bytes, max(over_bytes, facts.largest_bytes)) if over_bytes else 0
    best = plan = moving(nbytes)
    for _ in range(_TRIES):
        if plan.missing_bytes <= 0 or nbytes >= most_bytes:
            break
        nbytes = min(most_bytes, nbytes + max(plan.missing_bytes, facts.largest_bytes))
        plan = moving(nbytes)
        best = min(best, plan, key=_rank)
    further_bytes = max(facts.largest_bytes, nbytes / 100)
    while best.fits and best.predicted.waited_s > 0 and nbytes < most_bytes:
        nbytes = min(most_bytes, nbytes + further_bytes)
        further_bytes *= 2
        plan = moving(nbytes)
        if _rank(plan) > _rank(best):
            break
        best = plan
    return best


def _pays(facts: Facts, number: int) -> bool:
    """Whether a block, or a part of one, may recompute, and saves more than its input."""
    block = facts.blocks[number]
    return block.replay_s is not None and facts.block_bytes(number) > block.input_bytes


def movable(facts: Facts, recomputed: frozenset[int], budget_bytes: int, inputs: Iterable[int] = ()) -> list[int]:
    """List what may move, in order of forward: not what backward asks for before a write of it would be done."""
    found, late_bytes = [], 0
    limit_bytes = held_limit_bytes(budget_bytes, facts.largest_bytes)
    window_bytes = min(facts.read_ahead_bytes + facts.replay_bytes(recomputed), limit_bytes // 2)
    again = facts.again(recomputed)
    items = [(index, facts.at(index)) for index in chain(facts.movable, inputs)]
    items.sort(key=lambda item: item[1].saved_s)
    for index, each in reversed(items):
        if each.place in again:
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
    return 1 if plan.within_cap else 2, plan.missing_bytes
