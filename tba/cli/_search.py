"""Search: the largest batch, or the longest sequence, that fits under each policy."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

from tba._errors import ConfigError
from tba._forecast.forecast import Forecast
from tba._forecast.largest import largest
from tba._torch.user_frames import users_part


@dataclass(frozen=True)
class Search:
    """What is searched for, and in which steps.

    Attributes:
        what: "batch" or "sequence".
        step: numbers are tried in multiples of it.
        most: no number above it is tried.
    """

    what: str
    step: int
    most: int


BATCH, SEQUENCE = Search("batch", 1, 1 << 16), Search("sequence", 64, 1 << 24)


@dataclass(frozen=True)
class Largest:
    """What a search found.

    Attributes:
        search: what was searched for.
        by_policy: the largest number that fits under each policy; 0 where none does.
        ended_by: what ended the search before memory did; empty if nothing did.
    """

    search: Search
    by_policy: Mapping[str, int]
    ended_by: str

    @property
    def number(self) -> int:
        """The number that is planned: the largest one under a plan, or the smallest that was tried."""
        return max(self.search.step, self.by_policy["auto"])

    def __str__(self) -> str:
        numbers = ", ".join(f"{name} {number:,}" for name, number in self.by_policy.items())
        return f"largest {self.search.what} that fits: {numbers}" + (f" ({self.ended_by})" if self.ended_by else "")


def asked(find_batch: bool, find_sequence: bool, batch: int | None, sequence: int | None) -> Search | None:
    """The search that was asked for, if any. Raises ConfigError if options contradict each other."""
    if find_batch and find_sequence:
        raise ConfigError("--find-batch and --find-sequence were both given; give one, and the other as a number")
    search = BATCH if find_batch else SEQUENCE if find_sequence else None
    if search is not None and (batch if find_batch else sequence) is not None:
        what = search.what
        raise ConfigError(f"--{what} was given with --find-{what}, which tries them all; leave --{what} out")
    return search


def find(search: Search, planned: Callable[[int], Forecast]) -> Largest:
    """Search for the largest number under each policy.

    A number ends the search, as one that does not fit, if a config refuses it or the model's own code raises at it: a
    table of positions that is too short, for example.

    Raises:
        Whatever `planned` raises for the smallest number: the model does not run at all.
    """
    ends: dict[int, str] = {}

    def fits(policy: str, count: int) -> bool:
        number = count * search.step
        try:
            found = planned(number)
        except Exception as error:
            if count == 1 or not (isinstance(error, ConfigError) or users_part(error.__traceback__)):
                raise
            ends[number] = _why(error, f"{search.what} {number:,}")
            return False
        return found.fits(found.ways[policy])

    counts = {
        policy: largest(partial(fits, policy), search.most // search.step) for policy in planned(search.step).ways
    }
    by_policy = {policy: count * search.step for policy, count in counts.items()}
    return Largest(search, by_policy, ends[min(ends)] if ends else "")


def _why(error: Exception, at: str) -> str:
    if isinstance(error, ConfigError):
        return str(error)
    lines = str(error).splitlines()
    return f"at {at} the model raises {type(error).__name__}{': ' if lines else ''}{lines[0] if lines else ''}"
