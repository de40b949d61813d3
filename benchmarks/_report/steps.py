"""Training steps of several arms: their measurements as a table, and the bars they must keep."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Any

from .bar import Bar
from .ratios import doubt, ratios
from .results import Column, Grid, mib

AS_IS = "plain, as Python comes"
# Peak over idle of the offloaded run, as a share of plain's: (as Python comes, same allocator, under mimalloc).
_MEMORY_BARS = {"24x256": (0.30, 0.35, 0.35), "8x512": (0.40, 0.50, 0.45)}
_WALL_BAR, _CPU_BAR, _WAIT_BAR = 1.05, 1.07, 0.01


@dataclass(kw_only=True)
class Measured:
    """The measurements of one arm; each list has one value per timed round, each dict one per round.

    `waited_share` is the time that backward waited, `stalled_share` includes forward. `host_bytes` is the most host
    memory that the process of an arm on a device ever had; 0 on a CPU, where `peak_bytes` is the host's. So are
    `active_bytes`, which also has blocks that another stream still holds, and `reserved_bytes`, which has everything
    that PyTorch's allocator took; both over idle, as `peak_bytes`. `figures` has, by name, what arms of one benchmark
    tell beside.
    """

    name: str
    allocator: str
    about: Mapping[str, Any] = field(default_factory=dict)
    idle_bytes: int = 0
    peak_bytes: int = 0
    active_bytes: int = 0
    reserved_bytes: int = 0
    host_bytes: int = 0
    wall_s: list[float] = field(default_factory=list)
    cpu_s: list[float] = field(default_factory=list)
    waited_share: list[float] = field(default_factory=list)
    stalled_share: list[float] = field(default_factory=list)
    losses: dict[int, float] = field(default_factory=dict)
    gradients: dict[int, str] = field(default_factory=dict)
    moved: dict[str, float] = field(default_factory=dict)
    figures: dict[str, list[float]] = field(default_factory=dict)

    @property
    def exact(self) -> bool:
        """Whether its gradients must be plain's; not with a lossy preset."""
        return not self.about.get("inexact", False)

    def take(self, number: int, answer: Mapping[str, Any], *, timed: bool) -> None:
        """Add the answer of round `number`."""
        self.idle_bytes = answer["idle_bytes"]
        self.peak_bytes = max(self.peak_bytes, answer["peak_bytes"])
        for name in ("host_bytes", "active_bytes", "reserved_bytes"):
            setattr(self, name, max(getattr(self, name), answer.get(name, 0)))
        self.losses[number] = answer["loss"]
        self.gradients[number] = answer["gradients_sha256"]
        self.moved = answer["moved"]
        if timed:
            self.wall_s.append(answer["wall_s"])
            self.cpu_s.append(answer["cpu_s"])
            for name, value in answer.get("figures", {}).items():
                self.figures.setdefault(name, []).append(value)
            waited_s, stalled_s = (answer["moved"].get(name, 0.0) for name in ("wait_s", "backpressure_s"))
            self.waited_share.append(waited_s / answer["wall_s"])
            self.stalled_share.append((waited_s + stalled_s) / answer["wall_s"])


def same_gradients(arms: Sequence[Measured]) -> bool:
    """Compare losses and gradients of all exact arms, bit for bit, in every round they share."""
    first, *others = [arm for arm in arms if arm.exact]
    return all(
        arm.gradients[number] == first.gradients[number] and arm.losses[number] == first.losses[number]
        for arm in others
        for number in arm.gradients.keys() & first.gradients.keys()
    )


def equal_text(*groups: Sequence[Measured]) -> str:
    """Say for a table's note whether the gradients of all exact arms of a group are equal, in each group."""
    equal = "yes" if all(map(same_gradients, groups)) else "NO"
    whose = "of all exact arms" if len(groups) == 1 else "of all exact arms that are compiled, and of all others,"
    return f"Losses and gradients {whose} bit-equal: {equal}."


def arm_table(title: str, arms: Mapping[str, Measured], note: str, *more: Column, peaks: bool = True) -> Grid:
    """Make the table of memory (unless arms have no `peaks` of their own), time and bytes, with `more` columns.

    Ratios are to the arm "plain".
    """
    plain = arms["plain"]

    def timed(show: Callable[[Measured], str]) -> Callable[[Measured], str]:
        return lambda arm: show(arm) if arm.wall_s else "-"  # an arm outside the turns cannot be compared

    def moved(show: Callable[[Measured], str]) -> Callable[[Measured], str]:
        return lambda arm: show(arm) if arm.moved else "-"

    def ratio(over: Sequence[float], under: Sequence[float]) -> str:
        found = ratios(over, under)
        return f"{median(found):.3f} ± {doubt(found):.3f}"

    of_memory: list[Column] = [
        ("peak MiB", lambda arm: mib(arm.peak_bytes)),
        ("/ plain", lambda arm: f"{memory_share(arm, plain):.2f}"),
    ]
    of_device: list[Column] = [
        ("active MiB", lambda arm: mib(arm.active_bytes)),
        ("reserved MiB", lambda arm: mib(arm.reserved_bytes)),
    ]
    columns: list[Column] = [
        ("arm", lambda arm: str(arm.name)),
        *(of_memory if peaks else ()),
        *(of_device if plain.reserved_bytes else ()),
        ("step s", timed(lambda arm: f"{median(arm.wall_s):.3f}")),
        ("/ plain", timed(lambda arm: ratio(arm.wall_s, plain.wall_s))),
        ("CPU s", timed(lambda arm: f"{median(arm.cpu_s):.3f}")),
        ("/ plain", timed(lambda arm: ratio(arm.cpu_s, plain.cpu_s))),
        ("waited", timed(moved(lambda arm: f"{median(arm.waited_share):.2%}"))),
        ("written MiB", moved(lambda arm: mib(arm.moved["written_bytes"]))),
        *more,
    ]
    times = f"Times: medians; ratios: medians over {len(plain.wall_s)} rounds ± about 95% confidence."
    if plain.reserved_bytes:
        note += " Active: with blocks that other streams still hold. Reserved: all that PyTorch's allocator took."
    return Grid.of(title, arms.values(), columns, f"{note} {times}")


def step_bars(model: str, arms: Mapping[str, Measured]) -> list[Bar]:
    """Make the bars of each arm that offloads; for a model without limits of its own, the values are only shown."""
    plain, as_is, checkpoint = arms["plain"], arms.get(AS_IS), arms["checkpoint"]
    as_is_bar, plain_bar, mimalloc_bar = _MEMORY_BARS.get(model, (1.0, 1.0, 1.0))
    bars = []
    for name, arm in arms.items():
        if as_is is not None and arm.moved:
            what, limit = f"{name}: peak over idle / plain as Python comes", as_is_bar if arm.wall_s else mimalloc_bar
            bars.append(Bar(what=what, measured=memory_share(arm, as_is), limit=limit))
        if arm.wall_s and arm.moved:
            peaks, waits = memory_share(arm, checkpoint), median(arm.waited_share)
            bars += [
                Bar(what=f"{name}: peak over idle / plain", measured=memory_share(arm, plain), limit=plain_bar),
                time_bar(f"{name}: wall per step / plain", ratios(arm.wall_s, plain.wall_s), _WALL_BAR),
                time_bar(f"{name}: CPU seconds per step / plain", ratios(arm.cpu_s, plain.cpu_s), _CPU_BAR),
                Bar(what=f"{name}: backward waited", measured=waits, limit=_WAIT_BAR, unit="%"),
                Bar(what=f"{name}: peak / full checkpointing", measured=peaks, limit=1, sign="<"),
                time_bar(f"{name}: wall / full checkpointing", ratios(arm.wall_s, checkpoint.wall_s), 1, sign="<"),
            ]
    return bars if model in _MEMORY_BARS else [replace(bar, limit=None) for bar in bars]


def time_bar(what: str, found: Sequence[float], limit: float | None, *, sign: str = "<=") -> Bar:
    """A bar on the median of ratios, with the median's uncertainty."""
    return Bar(what=what, measured=median(found), limit=limit, sign=sign, spread=doubt(found))


def memory_share(arm: Measured, other: Measured) -> float:
    """Return the peak of one arm as a share of the other's."""
    return arm.peak_bytes / max(1, other.peak_bytes)
