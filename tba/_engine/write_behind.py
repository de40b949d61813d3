"""Write-behind: records whose operator has finished and which stay in memory for now, oldest first, within a budget.

What was saved last is wanted first. Tier `nvme` and `cpu` therefore hold back as much as read-ahead may take later
anyway: at the turn from forward to backward it is in memory, and a write of it is never begun. Tier `auto` holds
whatever memory can spare (`Ledger`). Over budget, the oldest goes first: it is needed last.

Wants the engine's lock held.
"""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Iterable
from typing import Any

from .._config import OffloadConfig
from .._memory.ledger import Ledger
from .._plan import policy
from .._record.record import Record
from .._record.user_code import Detached
from .._stats import Counters
from .._transfer.mover import Mover
from .steps import Progress


class WriteBehind:
    """Queue of records on their way out, as slow as memory allows.

    Attributes:
        ledger: counts what is held, and says how much may be.
        progress: of a long first micro-batch; looked at for each record that is saved or asked for.
        members: by number, oldest first: bytes of each. A plain dict would scan deleted slots to reach the oldest.
    """

    def __init__(self, config: OffloadConfig, mover: Mover, ledger: Ledger, counters: Counters) -> None:
        self.members: OrderedDict[int, tuple[weakref.ref[Record], int]] = OrderedDict()
        self._stays = config.tier == "auto"  # what memory has room for is not sent by `send_all`
        self._mover = mover
        self.ledger = ledger
        self._counters = counters
        self.progress = Progress(config.tier, counters)
        self._going: list[int] = []  # members that are to go by plan, a few at a time
        self._going_bytes = 0
        self._planned_bytes = 0  # saved so far in this step, of what goes by plan

    def add(self, record: Record) -> None:
        """Hold a record whose operator has finished, and send the oldest if that is too much."""
        record.hold()
        self.members[record.number] = record.ref, record.nbytes
        self.ledger.hold(record.nbytes, record.plain_bytes, record.device)
        if record.goes:
            self._going.append(record.number)
            self._going_bytes += record.nbytes
            self._planned_bytes += record.nbytes
        self._make_room(self.ledger.over_bytes, record.goes)
        if self.ledger.held_bytes > self._counters.held_bytes:
            self._counters.held_bytes = self.ledger.held_bytes
        if not self.progress.over:
            self.progress.look()

    def hold_again(self, record: Record) -> None:
        """Hold a record that backward has had and its graph still owns; it is the first to go."""
        self.members[record.number] = record.ref, record.nbytes
        self.members.move_to_end(record.number, last=False)
        self.ledger.count_held(record.nbytes)

    def count(self, packed: tuple[Any, ...], nbytes: int) -> None:
        """Count bytes that stay without a record, as long as their graph has them."""
        self.ledger.keep(packed[0], nbytes, shared=type(packed) is not Detached)

    def let_pass(self, finished: Iterable[tuple[int, tuple[Any, ...], int]]) -> None:
        """Count what their operators have finished (as `Step.due`), and wait if it is too much."""
        self.ledger.keep_awaited((packed[0], nbytes, type(packed) is not Detached) for _, packed, nbytes in finished)
        if self.members or self._mover.staging.bytes:
            self._make_room(self.ledger.over_bytes, False)

    def _make_room(self, over_bytes: int, goes: bool) -> None:
        """Send what is to go by plan, some of it at a time, and if that is too little the oldest.

        `over_bytes`: by which what is held exceeds what may be; `goes`: more is to go by plan than before.
        """
        ledger, mover = self.ledger, self._mover
        if self._going and (over_bytes > 0 or (goes and self._is_worth_waking())):
            self._send_going()
        if over_bytes > 0:
            if over_bytes > mover.staging.bytes or not self._planned_bytes:
                burst_bytes = policy.write_burst_bytes(ledger.limit_bytes, mover.limits.staging_bytes)
                self._send(ledger.hold_bytes - burst_bytes)
            if ledger.limited:  # forward waits for what is on its way out
                mover.wait_for_room(0, max(0, ledger.hold_bytes - ledger.held_bytes))

    def _is_worth_waking(self) -> bool:
        """Whether what is to go by plan is enough for one waking of a worker, or the last of it."""
        plan_bytes, link_bytes_per_s = self.ledger.expected.sent_bytes, self.ledger.expected.link_bytes_per_s
        if self._planned_bytes >= plan_bytes:
            return True
        limit_bytes, staging_bytes = self.ledger.limit_bytes, self._mover.limits.staging_bytes
        return self._going_bytes >= policy.planned_burst_bytes(limit_bytes, plan_bytes, staging_bytes, link_bytes_per_s)

    def send_all(self) -> None:
        """Send what is held, unless it stays because memory has room for it."""
        if not self._stays:
            self._send(0)

    def end_step(self) -> None:
        """Forget what goes by the plan of the step that has ended."""
        self._going, self._going_bytes, self._planned_bytes = [], 0, 0

    def bury(self, number: int) -> None:
        """Forget a member that has died."""
        _, nbytes = self.members.pop(number)
        self.ledger.count_held(-nbytes)

    def _send(self, held_bytes: int) -> None:
        """Send the oldest until no more than so many bytes are held."""
        while self.members and self.ledger.held_bytes > held_bytes:
            self._send_one(next(iter(self.members)))

    def _send_going(self) -> None:
        going, self._going, self._going_bytes = self._going, [], 0
        for number in going:
            if number in self.members:
                self._send_one(number)

    def _send_one(self, number: int) -> None:
        reference, nbytes = self.members.pop(number)
        self.ledger.count_held(-nbytes)
        record = reference()
        if record is None:
            return
        self._counters.kept_to_offloaded(record.set_offloaded(True), policy.FITS)
        why_not = self.send(record)
        if why_not is not None:
            self._counters.kept_to_offloaded(record.set_offloaded(False), why_not)

    def send(self, record: Record) -> str | None:
        """Send a record that is not held; returns why, if it stays after all."""
        why_not = self._mover.send(record)
        if why_not is None:
            self.ledger.sent(record.nbytes)
        return why_not
