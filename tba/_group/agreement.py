"""Agreement: ranks of one job come to one decision, over the job's own store, and learn alike where they do not.

Ranks are members of one agreement if they exchange data in the model's forward, or share a member that does. All of
them come to the same forwards in the same order, so each point where they meet has a name that all of them reach.

A meeting is a count in the store and a word that says how it ended. Each member adds 1 when it arrives; addition is
atomic, and the one that brings the count to the number of members is the last. Whoever first knows how the meeting ends
writes the word, by compare-and-set, and all others read it:

    in         all members have come
    refused    a member goes another way here, and does not come
    lost       a member has waited for `timeout_s`, or has left: there is no agreement any more, for nobody, with one
               warning

Guarantees:

1. `all_in` is True on all members or on none.
2. `decide` gives all members what the lowest of them has concluded from what all have said, or None to all. If that
   raises there, all others have None at once.
3. Nobody waits longer than `timeout_s` for others to come, nor for what the lowest concludes, and a lost agreement is
   waited for no more.
4. No collective is used, no process group and no thread is made. What is stored for a meeting is deleted after the
   next but one; a key for each rank stays.

Assumptions: members reach meetings in one order. The store is the one that `init_process_group` was given or made; if
it fails, its own error ends the training, as nobody could tell then what others do. What it holds is trusted, as
PyTorch itself does.
"""

from __future__ import annotations

import pickle
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from io_backends import interrupts

from .._torch.private import job_store
from .._torch.user_frames import warn

_IN, _REFUSED, _LOST = "in", "refused", "lost"  # how a meeting has ended
# Seconds between two looks at the store: first, at most for each member, so that many ask it no more often than few,
# and at most. `store.wait` would return at once, but c10d logs a warning whenever it times out, and signal handlers
# cannot run while it blocks.
_FIRST_S, _EACH_S, _LONGEST_S = 1e-4, 2.5e-4, 2e-2
_counts: Counter[str] = Counter()  # agreements in this process, by name: ranks make theirs in the same order


class Agreement:
    """One rank's part in an agreement.

    Attributes:
        members: ranks that belong to it, in order; none before `form`.
        lost: a member was late, or has left: nobody agrees on anything any more.
        timeout_s: to wait for others, at most.
        spent: seconds that this rank has spent on it, waiting for others.
    """

    def __init__(self, store: Any, rank: int, timeout_s: float) -> None:
        self.members: tuple[int, ...] = ()
        self.lost = False
        self.timeout_s = timeout_s
        self.spent = Spent()
        self._store, self._rank = store, rank
        self._keys: dict[str, None] = {}  # written since the last `tidy`, and before it
        self._old: dict[str, None] = {}

    @classmethod
    def of(cls, name: str, timeout_s: float) -> Agreement | None:
        """Make the next by this name in a job of several ranks; None for one rank, or if its store is not known."""
        _counts[name] += 1
        found = job_store(f"tba/{name}/{_counts[name]}")
        return None if found is None else cls(*found, timeout_s)

    def form(self, peers: frozenset[int]) -> bool:
        """Find the members, given the ranks that this one exchanges data with; whether there are several."""
        with self.spent:
            known, found = {self._rank, *peers}, {self._rank}
            if len(known) == 1:
                return False
            self._store.set(f"peers/{self._rank}", ",".join(map(str, sorted(known))))
            wait = _Wait(self.timeout_s, len(known))
            while missing := known - found:
                each = min(missing)
                told = self._read(f"peers/{each}", wait)
                if told is None:
                    self._lose(f"rank {each} has not told within {self.timeout_s:g} s with whom it exchanges data")
                    return False
                found.add(each)
                known |= set(map(int, told.split(",")))
            self.members = tuple(sorted(known))
            return True

    def all_in(self, name: str) -> bool:
        """Come to a meeting: whether all members do, and none refuses."""
        with self.spent:
            if self.lost:
                return False
            count, ended = self._meeting(name)
            if self._store.add(count, 1) == len(self.members):
                return self._end(ended, _IN)
            if (how := self._read(ended, _Wait(self.timeout_s, len(self.members)))) is not None:
                return self._has_ended(how)
            come = min(self._store.add(count, 0), len(self.members) - 1)  # the last may come just now
            why = f"{come} of {len(self.members)} ranks have come within {self.timeout_s:g} s"
            return self._end(ended, _LOST, why)

    def is_alike(self, name: str, said: str) -> bool:
        """Whether the first member to come here has said the same. Waits for nobody."""
        with self.spent:
            if self.lost:
                return False
            return bool(self._store.compare_set(self._key(name), "", said).decode() == said)

    def refuse(self, name: str) -> None:
        """Let a meeting fail for all, and do not wait for it."""
        if not self.lost:
            self._end(self._meeting(name)[1], _REFUSED)

    def leave(self, *names: str) -> None:
        """Let meetings, one of which is the next, and all that come after it fail for all members."""
        if self.members and not self.lost:
            self.lost = True
            with suppress(RuntimeError):  # at the end of a job its store may be gone first
                for name in names:
                    _, ended = self._meeting(name)
                    if self._store.compare_set(ended, "", _LOST).decode() == _REFUSED:  # nobody is in either way
                        self._store.compare_set(ended, _REFUSED, _LOST)

    def decide(self, name: str, said: Any, conclude: Callable[[list[Any]], Any]) -> Any:
        """Give all members what the lowest concludes from what all have `said`, in their order; None if not all come.

        It concludes something else than None.
        """
        with self.spent:
            self._store.set(self._key(f"{name}/{self._rank}"), pickle.dumps(said))
            if not self.all_in(name):
                return None
            answer, told = self._key(f"{name}/answer"), self._key(f"{name}/told")
            if self._rank == self.members[0]:
                keys = [self._key(f"{name}/{each}") for each in self.members]
                try:
                    concluded = pickle.dumps(conclude([pickle.loads(self._store.get(key)) for key in keys]))
                except BaseException as error:
                    self._end(told, _LOST, f"rank {self._rank} could not decide: {error!r}")  # nobody waits for it
                    raise
                self._store.set(answer, concluded)
                is_told = self._end(told, _IN)
            elif (how := self._read(told, _Wait(self.timeout_s, len(self.members)))) is not None:
                is_told = self._has_ended(how)
            else:
                is_told = self._end(told, _LOST, f"rank {self.members[0]} has not decided within {self.timeout_s:g} s")
            return pickle.loads(self._store.get(answer)) if is_told else None

    def tidy(self) -> None:
        """Delete what all members have read: what was stored for meetings before the last `tidy`.

        Call it after a meeting that all came to: they have left those before it.
        """
        if self._rank == self.members[0]:
            for key in self._old:
                self._store.delete_key(key)
            self._old, self._keys = self._keys, {}

    def _key(self, name: str) -> str:
        key = f"{self.members[0]}/{name}"  # other ranks of the job may have an agreement of their own
        if self._rank == self.members[0]:
            self._keys[key] = None
        return key

    def _meeting(self, name: str) -> tuple[str, str]:
        """The keys of a meeting: of its count, and of how it has ended."""
        return self._key(name), self._key(f"{name}/ended")

    def _read(self, key: str, wait: _Wait) -> str | None:
        """Wait until a key is in the store, and read it; None if that takes too long."""
        while not self._store.check([key]):
            if not wait.goes_on():
                return None
        return str(self._store.get(key).decode())

    def _end(self, ended: str, how: str, why: str = "") -> bool:
        """End a meeting, if no other rank has; whether all are in. `why`: the reason, if this ends the agreement."""
        return self._has_ended(self._store.compare_set(ended, "", how).decode(), why)

    def _has_ended(self, how: str, why: str = "") -> bool:
        """Note how a meeting has ended; whether all are in."""
        if how == _LOST:
            self._lose(why or "another rank has left, or has waited too long")
        return how == _IN

    def _lose(self, why: str) -> None:
        self.lost = True
        warn(
            f"ranks do not agree on a plan any more: {why}. From here on each rank plans for itself, and no block that "
            "communicates recomputes. If a rank may be later than that, raise rank_timeout"
        )


class Ballot:
    """A vote of all members on one thing that they do together or not at all.

    Attributes:
        members: who votes.
    """

    def __init__(self, agreement: Agreement, name: str) -> None:
        self.members = frozenset(agreement.members)
        self._agreement, self._name = agreement, name

    def agrees(self) -> bool:
        """Vote for it; whether all do."""
        return self._agreement.all_in(self._name)

    def refuse(self) -> None:
        """Vote against it."""
        self._agreement.refuse(self._name)


class Spent:
    """Seconds that have passed within it; those of a use within another count once."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._depth, self._since_s = 0, 0.0

    def __enter__(self) -> None:
        if not self._depth:
            self._since_s = time.perf_counter()
        self._depth += 1

    def __exit__(self, *_: object) -> None:
        self._depth -= 1
        if not self._depth:
            self.seconds += time.perf_counter() - self._since_s


class _Wait:
    """A wait for others: looks ever more seldom, lets the program's signal handlers run, and ends."""

    def __init__(self, timeout_s: float, members: int) -> None:
        self._until_s = time.monotonic() + timeout_s
        self._next_s, self._longest_s = _FIRST_S, min(members * _EACH_S, _LONGEST_S)

    def goes_on(self) -> bool:
        """Sleep until the next look; False once the time is over, or a handler has raised."""
        interrupts.look()
        if time.monotonic() >= self._until_s or interrupts.waiting():
            return False
        time.sleep(self._next_s)
        self._next_s = min(2 * self._next_s, self._longest_s)
        return True
