"""Decision: one for all ranks, which the one with least room and the one with the slowest link can carry out."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest

from support.plans import MIB, layers
from tba._auto.joint import ALONE, LOOKING, SURVEYING, TRYING, Joint, Phase, Said, _conclude
from tba._group.decision import Decision, Share, decide_together
from tba._plan.greedy import decide, decide_moves

FAST, SLOW = 2e9, 50e6
RANKS = (0, 3)


def _share(*, rate: float = FAST, share: float = 0.5, replay_s: float | None = 0.0) -> Share:
    facts = layers(12, 8, rate=rate, replay_s=replay_s)
    return Share(facts, int(share * facts.saved_bytes), frozenset(range(12)))


@pytest.mark.parametrize("rate", [FAST, 4e8, SLOW])
@pytest.mark.parametrize("share", [0.3, 0.5, 0.9])
def test_what_the_hardest_rank_does_is_feasible_on_each(rate: float, share: float) -> None:
    shares = [_share(share=share), _share(rate=rate, share=0.6)]
    decision = decide_together(RANKS, shares)
    assert decision is not None
    for each in shares:
        plan = decide_moves(each.facts, each.budget_bytes, decision.recomputed)
        assert plan.fits
        assert plan.recomputed == decision.recomputed
    worst = decide(layers(12, 8, rate=rate), min(each.budget_bytes for each in shares))
    assert decision.recomputed == worst.recomputed
    assert bool(decision.recomputed) == (rate == SLOW or (rate == 4e8 and bool(worst.recomputed)))


def test_a_plan_names_the_ranks_that_bind() -> None:
    decision = decide_together(RANKS, [_share(rate=SLOW, share=0.9), _share(share=0.5)])
    assert decision is not None
    assert decision.told == (
        "agreed by ranks 0, 3: rank 3 has the least room, 96 MiB, rank 0 the slowest link, 47.7 MiB/s out and "
        "47.7 MiB/s back"
    )


def test_a_block_that_one_rank_must_not_repeat_recomputes_on_none() -> None:
    fine, other = _share(rate=SLOW), _share(rate=SLOW)
    blocks = tuple(
        replace(each, replay_s=None) if number % 2 else each for number, each in enumerate(other.facts.blocks)
    )
    other = replace(other, facts=replace(other.facts, blocks=blocks))
    decision = decide_together(RANKS, [fine, other])
    assert decision is not None
    assert decision.recomputed
    assert all(number % 2 == 0 for number in decision.recomputed)
    assert decision.joint == decision.recomputed


def test_moves_are_decided_anew_beneath_the_same_blocks() -> None:
    facts, recomputed = layers(12, 8, rate=SLOW), frozenset({0, 4})
    plan = decide_moves(facts, facts.saved_bytes // 2, recomputed)
    assert plan.decide is not None
    roomy = plan.decide(facts, facts.saved_bytes)
    assert roomy.recomputed == plan.recomputed == recomputed
    assert sum(roomy.sends.values()) < sum(plan.sends.values())


def _said(
    name: str = "a", *, wants: bool = False, blocks: tuple[str, ...] | None = None, share: Share | None = None
) -> Said:
    return Said(name, wants, blocks, share)


@pytest.mark.parametrize(
    ("phase", "said", "then"),
    [
        (LOOKING, [_said(), _said()], LOOKING),
        (LOOKING, [_said(wants=True), _said()], SURVEYING),
        (LOOKING, [_said(wants=True), _said("b", wants=True)], LOOKING),
        (SURVEYING, [_said(blocks=("x",)), _said()], SURVEYING),
        (SURVEYING, [_said(blocks=("x",)), _said(blocks=("x",))], TRYING),
        (SURVEYING, [_said(blocks=("x",)), _said(blocks=("y",))], LOOKING),
        (TRYING, [_said(share=_share()), _said()], TRYING),
        (TRYING, [_said(share=_share()), _said("b", share=_share())], LOOKING),
        (TRYING, [_said(share=_share()), _said(share=Share(layers(11, 8), MIB, frozenset()))], LOOKING),
    ],
)
def test_ranks_go_on_together_only_where_all_are_alike(phase: Phase, said: list[Said], then: Phase) -> None:
    conclude = partial(_conclude, RANKS)
    assert conclude([(phase, each) for each in said]) is then
    assert conclude([(phase, said[0]), (SURVEYING if phase is TRYING else TRYING, said[1])]) is LOOKING


def test_ranks_that_have_seen_alike_steps_decide() -> None:
    said = [(TRYING, _said(share=_share())), (TRYING, _said(share=_share()))]
    assert isinstance(_conclude(RANKS, said), Decision)


def test_a_rank_that_exchanges_nothing_looks_at_no_store(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tba._group.agreement.job_store", None)
    joint = Joint("Net", 60.0)
    for _ in range(3):
        assert not joint.begin_forward()
        assert joint.carry_out(joint=False)
        joint.end_forward()
    assert joint.phase is ALONE
