"""Training steps of several arms: their measurements as a table, and the bars they must keep."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Any

from .bar import Bar
from .ratios import doubt, median_ratio, ratios
from .results import Grid, mib

# Peak over idle of the offloaded run, as a share of plain's: (as Python comes, same allocator, under mimalloc).
_MEMORY_BARS = {"24x256": (0.30, 0.35, 0.35), "8x512": (0.40, 0.50, 0.45)}
_WALL_BAR, _CPU_BAR, _WAIT_BAR = 1.05, 1.07, 0.01


@dataclass(kw_only=True)
class Measured:
    """The measurements of one arm; each list has one value per timed round, each dict one per round.

    `waited_share` is backward's waiting, `stalled_share` that of forward too. `host_bytes` is the most memory that the
    process of an arm on a card ever had on the host; 0 on a CPU, where `peak_bytes` is the host's.
    """

    name: str
    allocator: str
    about: Mapping[str, Any] = field(default_factory=dict)
    idle_bytes: int = 0
    peak_bytes: int = 0
    host_bytes: int = 0
    wall_s: list[float] = field(default_factory=list)
    cpu_s: list[float] = field(default_factory=list)
    waited_share: list[float] = field(default_factory=list)
    stalled_share: list[float] = field(default_factory=list)
    losses: dict[int, float] = field(default_factory=dict)
    gradients: dict[int, str] = field(default_factory=dict)
    moved: dict[str, float] = field(default_factory=dict)

    @property
    def exact(self) -> bool:
        """Whether its gradients are to be plain's; not where bytes are lost on purpose."""
        return not self.about.get("inexact", False)

    def take(self, number: int, answer: Mapping[str, Any], *, timed: bool) -> None:
        """Add the answer of round `number`."""
        self.idle_bytes = answer["idle_bytes"]
        self.peak_bytes = max(self.peak_bytes, answer["peak_bytes"])
        self.host_bytes = max(self.host_bytes, answer.get("host_bytes", 0))
        self.losses[number] = answer["loss"]
        self.gradients[number] = answer["gradients_sha256"]
        self.moved = answer["moved"]
        if timed:
            self.wall_s.append(answer["wall_s"])
            self.cpu_s.append(answer["cpu_s"])
            waited_s, stalled_s = (answer["moved"].get(name, 0.0) for name in ("wait_s", "backpressure_s"))
            self.waited_share.append(waited_s / answer["wall_s"])
            self.stalled_share.append((waited_s + stalled_s) / answer["wall_s"])


def same_gradients(arms: Sequence[Measured]) -> bool:
    """Compare losses and gradients of all arms, bit for bit, in every round they share."""
    arms = [arm for arm in arms if arm.exact]
    first = arms[0]
    return all(
        arm.gradients[number] == first.gradients[number] and arm.losses[number] == first.losses[number]
        for arm in arms[1:]
        for number in arm.gradients.keys() & first.gradients.keys()
    )


def arm_table(title: str, arms: Mapping[str, Measured], note: str) -> Grid:
    """Make the table of memory, time and bytes; ratios are to the arm "plain"."""
    base = arms["plain"]
    rows = []
    for arm in arms.values():
        times = ("-",) * 5  # an arm outside the turns has no partners to be compared with
        if arm.wall_s:
            times = (
                f"{median(arm.wall_s):.3f}",
                f"{median_ratio(arm.wall_s, base.wall_s):.3f}",
                f"{median(arm.cpu_s):.3f}",
                f"{median_ratio(arm.cpu_s, base.cpu_s):.3f}",
                f"{median(arm.waited_share):.2%}" if arm.moved else "-",
            )
        peak = mib(arm.peak_bytes), f"{memory_share(arm, base):.2f}"
        written = f"{mib(arm.moved['written_bytes'])} MiB" if arm.moved else "-"
        rows.append((arm.name, arm.allocator, *peak, *times, written))
    columns = ("arm", "allocator", "peak MiB", "/ plain", "step s", "/ plain", "CPU s", "/ plain", "waited", "written")
    times_note = f" Times: medians; ratios: medians over {len(base.wall_s)} rounds."
    return Grid(title, columns, rows, note + times_note)


def cpu_bars(model: str, arms: Mapping[str, Measured]) -> list[Bar]:
    """The bars of a step on a CPU; a model without limits of its own has its values only shown."""
    as_is, plain, offload = arms["plain, as Python comes"], arms["plain"], arms["offload nvme"]
    checkpoint, mimalloc = arms["checkpoint"], arms.get("offload nvme, mimalloc")
    limits = _MEMORY_BARS.get(model, (1.0, 1.0, 1.0))
    bars = [
        Bar(what="peak over idle / plain as Python comes", measured=memory_share(offload, as_is), limit=limits[0]),
        Bar(what="peak over idle / plain, same allocator", measured=memory_share(offload, plain), limit=limits[1]),
    ]
    if mimalloc is not None:
        what = "peak over idle under mimalloc / plain as Python comes"
        bars.append(Bar(what=what, measured=memory_share(mimalloc, as_is), limit=limits[2]))
    wall, cpu = ratios(offload.wall_s, plain.wall_s), ratios(offload.cpu_s, plain.cpu_s)
    against = ratios(offload.wall_s, checkpoint.wall_s)
    bars += [
        _time("wall per step / plain, same allocator", wall, _WALL_BAR),
        _time("CPU seconds per step / plain, same allocator", cpu, _CPU_BAR),
        Bar(what="backward's waiting", measured=median(offload.waited_share), limit=_WAIT_BAR, unit="%"),
        Bar(what="peak / full checkpointing", measured=memory_share(offload, checkpoint), limit=1, sign="<"),
        _time("wall / full checkpointing", against, 1, sign="<"),
    ]
    return bars if model in _MEMORY_BARS else [replace(bar, limit=None) for bar in bars]


def cuda_bars(arms: Mapping[str, Measured]) -> list[Bar]:
    """The values of a step on a GPU, where no limits are set."""
    plain, checkpoint = arms["plain"], arms["checkpoint"]
    bars = []
    for name in ("offload nvme", "offload cpu"):
        arm = arms[name]
        bars += [
            Bar(what=f"{name}: peak over idle / plain", measured=memory_share(arm, plain), limit=None),
            _time(f"{name}: wall / plain", ratios(arm.wall_s, plain.wall_s), None),
            Bar(what=f"{name}: backward's waiting", measured=median(arm.waited_share), limit=None, unit="%"),
            Bar(what=f"{name}: peak / full checkpointing", measured=memory_share(arm, checkpoint), limit=None),
            _time(f"{name}: wall / full checkpointing", ratios(arm.wall_s, checkpoint.wall_s), None),
        ]
    return bars


def _time(what: str, found: Sequence[float], limit: float | None, *, sign: str = "<=") -> Bar:
    """A bar on the median of ratios, with the median's doubt."""
    return Bar(what=what, measured=median(found), limit=limit, sign=sign, spread=doubt(found))


def memory_share(arm: Measured, other: Measured) -> float:
    """Return the peak of one arm as a share of the other's."""
    return arm.peak_bytes / max(1, other.peak_bytes)
