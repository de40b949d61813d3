"""Decision: one for all ranks, which the one with least room and the one with the slowest link can carry out."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest

from support.plans import MIB, layers
from tba._auto.joint import ALONE, LOOKING, SURVEYING, TIMING, TRYING, Joint, Phase, Said, _conclude
from tba._group.decision import Decision, Share, after_steps, decide_together
from tba._plan.contest import STEPS
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


def _decided(*shares: Share) -> Decision:
    decision = decide_together(RANKS, shares)
    assert decision is not None
    return decision


def test_ranks_whose_steps_take_what_they_should_try_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    shares = [_share(share=0.6), _share(share=0.5)]
    decision = _decided(*shares)
    assert not decision.recomputed
    assert not decision.settled
    foreseen_s = decide_moves(shares[1].facts, shares[1].budget_bytes, decision.recomputed).predicted.step_s
    assert foreseen_s == decision.predicted_s
    settled = replace(decision, settled=True)
    assert after_steps(decision, shares, [foreseen_s, foreseen_s]) == settled
    with monkeypatch.context() as patch:
        patch.setattr("tba._group.decision.decide", None)  # and they plan nothing more
        assert after_steps(decision, shares, [foreseen_s, 1.09 * foreseen_s]) == settled
    assert after_steps(decision, shares, [foreseen_s, 1.11 * foreseen_s]).against == decision


@pytest.mark.parametrize("takes", [[0.8, 0.99], [0.96, 0.9], [0.8, 1.01], [0.98], [2.0]])
def test_where_steps_take_longer_ranks_try_other_blocks_and_keep_what_is_faster_twice(takes: list[float]) -> None:
    shares = [_share(share=0.6), _share(share=0.5)]
    decision = _decided(*shares)
    trial = after_steps(decision, shares, [1.0, 4.0])  # the slowest rank counts
    assert (trial.against, trial.against_s, trial.settled) == (decision, 4.0, False)
    assert trial.recomputed
    assert trial.joint == trial.recomputed
    assert trial.tried == f"on trial, for {STEPS} steps"
    for each in shares:
        assert not decide_moves(each.facts, each.budget_bytes, trial.recomputed).sends
    after = after_steps(trial, shares, [0.5, 4.0 * takes[0]])
    if len(takes) > 1:
        assert after == replace(trial, ahead=True, tried=f"on trial, for {STEPS} more steps")
        after = after_steps(after, shares, [0.5, 4.0 * takes[1]])
    assert after.settled
    assert after.against is None
    assert not after.ahead
    wins = len(takes) > 1 and takes[1] < 1
    assert after.recomputed == (trial.recomputed if wins else decision.recomputed)
    assert f"{4 * takes[-1]:.3f} s a step, not 4.000 s" in after.tried
    assert wins or f"was tried for {STEPS * len(takes)} steps" in after.tried


def test_recomputed_blocks_are_tried_against_moving_too() -> None:
    shares = [_share(rate=2e8, share=0.3)] * 2
    decision = _decided(*shares)
    assert decision.recomputed
    moves_s = decide(shares[0].facts, shares[0].budget_bytes, recomputes=False).predicted.step_s
    trial = after_steps(decision, shares, [2 * moves_s] * 2)
    assert trial.against == decision
    assert trial.recomputed != decision.recomputed
    facts, budget_bytes = shares[0].facts, shares[0].budget_bytes
    others = [decide(facts, budget_bytes, moves=False), decide(facts, budget_bytes, recomputes=False)]
    assert trial.recomputed == min(others, key=lambda plan: plan.predicted.step_s).recomputed


def test_where_all_fits_there_is_nothing_to_be_timed() -> None:
    assert _decided(_share(share=2.0), _share(share=1.5)).settled


def _said(
    name: str = "a", *, wants: bool = False, blocks: tuple[str, ...] | None = None, share: Share | None = None
) -> Said:
    return Said(name, wants, blocks, share)


def _timed(share: float = 0.5, *, step_s: float | None = 9.0, settled: bool = False, wants: bool = False) -> Said:
    shares = [_share(share=share)] * 2
    return Said("a", wants, None, shares[0] if step_s else None, replace(_decided(*shares), settled=settled), step_s)


@pytest.mark.parametrize(
    ("said", "late", "then"),
    [
        ([_timed(), _timed(step_s=None)], False, TIMING),
        ([_timed(), _said()], False, TIMING),
        ([_timed(settled=True), _timed(settled=True)], False, TIMING),
        ([_timed(), replace(_timed(), name="b")], False, LOOKING),
        ([_timed(), _timed(wants=True)], False, LOOKING),  # it has departed
        ([_timed(), _timed(step_s=None)], True, LOOKING),
        ([replace(_timed(), amid=True), _timed()], True, TIMING),
        ([replace(_timed(), amid=True), replace(_timed(wants=True), amid=True)], False, TIMING),
    ],
)
def test_ranks_time_the_same_steps_and_not_for_ever(said: list[Said], late: bool, then: Phase) -> None:
    assert _conclude(RANKS, [(TIMING, each) for each in said], late=late) is then


def test_ranks_that_have_timed_their_steps_decide_again() -> None:
    found = _conclude(RANKS, [(TIMING, _timed()), (TIMING, _timed())])
    assert isinstance(found, Decision)
    assert found.against is not None


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
        assert joint.carry_out(None)
        joint.end_forward()
    assert joint.phase is ALONE
