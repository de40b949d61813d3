"""Joint: how far the ranks that train together have come with a plan that all of them follow.

    LOOKING    at some forwards they ask each other whether any of them wants a plan for such a step
      | one does
    SURVEYING  all find their blocks, whether their own step fits or not
      | all have found the same
    TRYING     all try their blocks, those that communicate by a vote
      | all have seen a whole step
    TIMING     they have decided, carry it out from the forward on in which they learn of it, and time a few steps;
      |        perhaps a few by another choice of blocks, too (`after_steps`)
    LOOKING    they go on with what was faster
    ALONE      this rank exchanges nothing in its forward; or a rank was late, and nobody agrees any more

Guarantees:

1. All ranks pass from one to the next in the same forward of theirs.
2. Blocks that communicate recompute in a forward (`together`) only if all ranks have come to it and will recompute the
   same. A rank that departs from the plan says so where its next forward begins, and all others depart from it there.
3. One rank alone, or one whose forward exchanges nothing, looks at no store.

Assumption: ranks that exchange data in the model's forward call it equally often.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from functools import partial

from .._blocks.communication import Communication
from .._group.agreement import Agreement, Ballot
from .._group.decision import Decision, Share, after_steps, decide_together

_OFTEN = 8  # forwards, at each of which ranks look; then at two in a row ever fewer times, and at least every so often
_SELDOM = 256
_MOST_TIMED = 256  # forwards spent on timing one choice, including those of other kinds of steps
_MOST_ATTEMPTS = 8  # after which ranks do not look any more: their steps are never alike, or depart again and again


class Phase(enum.Enum):
    """What ranks do together."""

    LOOKING = enum.auto()
    SURVEYING = enum.auto()
    TRYING = enum.auto()
    TIMING = enum.auto()
    ALONE = enum.auto()


LOOKING, SURVEYING, TRYING, TIMING, ALONE = Phase


@dataclass(frozen=True)
class Said:
    """What a rank says where ranks meet.

    Attributes:
        name: of the kind of step that begins.
        wants: it wants a plan for that.
        blocks: paths of the blocks that it has found; None if it has not looked yet.
        share: what it has seen of a step with these blocks; None before.
        decision: that it follows; None without one.
        step_s: its fastest step by that; None while it still times them.
        amid: it is in the midst of a step of several forwards.
    """

    name: str
    wants: bool
    blocks: tuple[str, ...] | None
    share: Share | None
    decision: Decision | None = None
    step_s: float | None = None
    amid: bool = False


class Joint:
    """One rank's part in it.

    Args:
        model: its name, which ranks that train parts of one model have in common.
        timeout_s: to wait for other ranks, at most.

    Attributes:
        phase: of the forward under way.
        together: in it, all ranks recompute the blocks that communicate and that their plan says so of.
    """

    def __init__(self, model: str, timeout_s: float) -> None:
        self.phase, self.together = LOOKING, False
        self._name, self._timeout_s = model, timeout_s
        self._agreement: Agreement | None = None
        self._first: Communication | None = None  # the first forward
        self._peers: frozenset[int] = frozenset()
        self._forwards = self._attempts = self._timed = 0
        self._binds = False  # blocks have been agreed on that communicate

    def begin_forward(self) -> bool:
        """Begin a forward; whether ranks are to `meet` in it. The second may wait until it is known which."""
        self._forwards += 1
        if self._forwards == 1:
            self._first = Communication()
            self._first.__enter__()
        elif self._forwards == 2 and not self._form():
            self.phase = ALONE
        looks = self.phase is not LOOKING or self._is_due(self._forwards)
        return self._agreement is not None and self.phase is not ALONE and looks

    def meet(self, said: Said) -> Phase | Decision | None:
        """Meet the others; it may wait. Returns what is new since the last meeting.

        That is the phase that begins, or the decision that it ends with. None: nothing is.
        """
        assert self._agreement is not None
        before, late = self.phase, self._timed >= _MOST_TIMED
        self._timed = self._timed + 1 if before is TIMING else 0
        conclude = partial(_conclude, self._agreement.members, late=late)
        found: Phase | Decision | None = self._agreement.decide(str(self._forwards), (before, said), conclude)
        if found is None:
            self.phase = ALONE
            return ALONE
        self._agreement.tidy()
        if isinstance(found, Decision):
            self.phase, self._timed = LOOKING if found.settled else TIMING, 0
            self._binds = self._binds or bool(found.joint)
            return found
        self.phase = found
        self._attempts += found is SURVEYING and before is LOOKING
        return found if found is not before else None

    def _form(self) -> bool:
        """Find out with whom to meet; whether there is anybody."""
        self.end_forward()
        if self._peers:
            self._agreement = Agreement.of(self._name, self._timeout_s)
        return self._agreement is not None and self._agreement.form(self._peers)

    def _is_due(self, forwards: int) -> bool:
        # Two in a row, as two kinds of steps may take turns.
        either = (forwards, forwards - 1)
        often = forwards <= _OFTEN or any(not each & (each - 1) or not each % _SELDOM for each in either)
        return often and self._attempts < _MOST_ATTEMPTS

    def carry_out(self, which: str | None) -> bool:
        """Begin a forward in which blocks that communicate recompute; False if others do not recompute the same.

        `which`: names the kind of step and its blocks; None if this rank recomputes none of them.
        """
        self.together = False
        if self._agreement is None or not self._binds or self.phase is ALONE:
            return which is None
        name = f"{self._forwards}/all"
        if which is not None and self._agreement.is_alike(f"{self._forwards}/which", which):
            self.together = self._agreement.all_in(name)
        else:
            self._agreement.refuse(name)
        if self.together:
            self._agreement.tidy()
        elif self._agreement.lost:
            self.phase = ALONE
        return self.together or which is None

    @property
    def agreement_s(self) -> float:
        """Seconds that it has taken this rank."""
        return 0.0 if self._agreement is None else self._agreement.spent.seconds

    @property
    def together_with(self) -> frozenset[int]:
        """The ranks that do so; none where this forward has none."""
        goes_on = self.together and self.phase is not ALONE
        return frozenset(self._agreement.members if goes_on and self._agreement is not None else ())

    def ballot(self, visit: int) -> Ballot | None:
        """Make the vote on trying a block; None while ranks try nothing together."""
        if self._agreement is None or self.phase is not TRYING:
            return None
        return Ballot(self._agreement, f"{self._forwards}/block/{visit}")

    def end_forward(self) -> None:
        """Note that the model's forward has ended."""
        if (first := self._first) is not None:
            self._first = None
            first.__exit__(None, None, None)
            self._peers = first.ranks

    def leave(self) -> None:
        """Take part in nothing any more, and have others wait for nothing."""
        if self._agreement is not None and self.phase is not ALONE:
            coming = self._forwards + 1
            looked = next((each for each in range(coming, coming + _SELDOM) if self._is_due(each)), coming)
            self._agreement.leave(f"{coming}/all", str(coming if self.phase is not LOOKING else looked))
        self.phase, self.together = ALONE, False


def _conclude(ranks: tuple[int, ...], said: list[tuple[Phase, Said]], *, late: bool = False) -> Phase | Decision:
    """Conclude what comes next from what all ranks have said, in their order. `late`: to time more steps. Pure."""
    phase, all_said = said[0][0], [each for _, each in said]
    if phase is TIMING and any(each.amid for each in all_said):
        return TIMING  # nothing changes within a step
    if len({(each, one.name) for each, one in said}) > 1:
        return LOOKING
    if phase is LOOKING:
        return SURVEYING if any(each.wants for each in all_said) else LOOKING
    if phase is SURVEYING:
        found = {each.blocks for each in all_said}
        return SURVEYING if None in found else TRYING if len(found) == 1 else LOOKING
    shares = [each.share for each in all_said if each.share is not None]
    if phase is TIMING:
        if late or any(each.wants for each in all_said):
            return LOOKING
        seconds = [each.step_s for each in all_said if each.step_s is not None]
        decision = all_said[0].decision
        if decision is None or decision.settled or not len(seconds) == len(shares) == len(all_said):
            return TIMING
        return after_steps(decision, shares, seconds)
    return TRYING if len(shares) < len(all_said) else decide_together(ranks, shares) or LOOKING
