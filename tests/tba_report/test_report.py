"""Reports: a page whose numbers are those of `stats()`, that needs nothing else, and that a browser draws."""

from __future__ import annotations

import json
import shutil
import subprocess
import time
from functools import partial
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from matplotlib.image import imread
from torch import Tensor, nn

from support.engine import activation, chain, engine, last_recorded
from tba import ConfigError, Offloader, TraceEvent, describe, offload_context
from tba._report.course import course, thinned
from tba._stats import Recorder
from tba._text import size

MIB = 1 << 20
N = 64
X_BYTES = N * N * 4


class Page(HTMLParser):
    """The text of each element that a test looks at, and whatever a page would load."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.rows: list[list[str]] = []
        self.titles: list[str] = []
        self.cards: list[str] = []
        self.data: dict[str, Any] = {}
        self.loads: list[str] = []
        self.paths = 0
        self._open: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in ("meta", "br"):
            self._open.append(tag)
        self.loads += [f"{tag} {name}={value}" for name, value in attrs if name in ("src", "href", "srcset")]
        self.paths += tag == "path"
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in ("meta", "br"):
            self._open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag  # what was opened last

    def handle_data(self, data: str) -> None:
        here = self._open[-1] if self._open else ""
        if "td" in self._open or here == "th":
            self.rows[-1][-1] += data
        if here == "h2":
            self.titles.append(data)
        if here == "b":
            self.cards.append(data)
        if here == "script":
            self.data = json.loads(data)


def _train(offload: Offloader, steps: int = 2) -> None:
    for _ in range(steps):
        _, x = activation(N, N)
        with offload:
            y = chain(x)
        offload.flush()
        y.sum().backward()


def _read(offload: Offloader, scratch: Path) -> Page:
    path = scratch / "out.html"
    offload.report(path)
    return Page(path.read_text(encoding="utf-8"))


def test_the_numbers_are_those_of_stats(scratch: Path) -> None:
    with engine(scratch) as offload:
        _train(offload)
        page = _read(offload, scratch)
        stats = offload.stats()
    now = ("projected_bytes_per_day",)  # it depends on the clock
    assert page.data["stats"].keys() == stats.asdict().keys()
    assert {k: v for k, v in page.data["stats"].items() if k not in now} == {
        k: v for k, v in stats.asdict().items() if k not in now
    }
    assert stats.last_step is not None
    last = stats.last_step
    assert page.cards[:3] == list(map(size, (stats.step_peak_bytes, last.written_bytes, last.read_bytes)))
    assert stats.plain_peak_bytes == 8 * X_BYTES
    table = {row[0]: row[1:] for row in page.rows}
    assert table["handed to the tier"] == [size(16 * X_BYTES), "100%", size(8 * X_BYTES), "100%"]
    assert table["written"][0] == size(stats.written_bytes)
    assert page.data["settings"] == [[s.name, str(s.value), s.origin] for s in describe(offload.config)]
    assert table["tier"] == ["nvme", "argument"]
    assert table["min_tensor_bytes"] == ["0", "argument"]
    assert page.titles == [
        *("Saved tensors in memory, micro-batch 2", "Transfers and waits, micro-batch 2"),
        *("Bytes by class", "Plan", "Settings"),
    ]
    assert page.paths == 3  # two courses, one of them filled
    assert page.loads == []


def test_the_course_is_that_of_the_engine(scratch: Path) -> None:
    with engine(scratch) as offload:
        _train(offload)
        with offload.trace() as events:
            _train(offload, steps=1)
            offload.stats()  # ends it
        page = _read(offload, scratch)
        peak_bytes = offload.stats().peak_bytes
    found = course(events, ["write", "read"])
    assert found is not None
    assert found.most_plain_bytes == 8 * X_BYTES
    assert found.plain[-1][1] == 0
    assert 0 < found.most_held_bytes <= peak_bytes <= 8 * X_BYTES
    assert found.held[-1][1] == 0
    assert found.nbytes["write"] == found.nbytes["read"] > 0
    assert page.titles[0] == "Saved tensors in memory, the region inside trace()"


class Sines(nn.Module):
    """A block that saves what it is given, and what each of its operators but the last makes."""

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(6):
            x = x.sin()
        return x


class Marked(nn.Module):
    """Blocks; where one ends, in forward or backward, it marks the time and the bytes that plain PyTorch holds then."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(N))
        self.blocks = nn.ModuleList(Sines() for _ in range(6))
        self.marks: list[tuple[float, int]] = []

    def forward(self, x: Tensor) -> Tensor:
        self.marks = [(time.perf_counter(), 0)]
        x = x * self.weight
        for number, block in enumerate(self.blocks):
            x.register_hook(partial(self._mark, 1 + 6 * number))
            x = block(x)
            self._mark(1 + 6 * (number + 1))
        return x.sum()

    def _mark(self, count: int, *_: Tensor) -> None:
        self.marks.append((time.perf_counter(), count * 64 * X_BYTES))


@pytest.mark.parametrize(
    ("settings", "does"),
    [
        ({"memory_budget": "1GiB"}, "count"),
        ({}, "off"),
        ({"memory_budget": 20 * 64 * X_BYTES}, "move"),
        ({"memory_budget": 20 * 64 * X_BYTES, "nvme_budget": 4 * 64 * X_BYTES}, "recompute"),
        ({"memory_budget": 12 * 64 * X_BYTES, "compress": "exact"}, "derive"),
        ({"tier": "nvme"}, "move all"),
        ({"tier": "keep", "compress": "exact"}, "keep"),
    ],
)
def test_a_page_has_what_plain_pytorch_would_hold_at_every_instant(
    scratch: Path, settings: dict[str, Any], does: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tba._report.course._COLUMNS", 1 << 40)  # points are not thinned
    model, marks = Marked(), list[list[tuple[float, int]]]()
    blocks = {} if "tier" in settings else {"blocks": Sines}
    offload = offload_context(model, **{"storage_paths": scratch, "min_tensor_bytes": 4096} | blocks | settings)
    for _ in range(8):
        with offload:
            model(torch.ones(64 * N, N)).backward()
        marks.append([*model.marks, (time.perf_counter(), 0)])
        stats = offload.stats()
    (events, number), plan = last_recorded(offload), offload.plan
    offload.close()
    assert number == (1 if does == "off" else 8)
    if does in ("move", "recompute"):
        assert plan
        assert plan.sends if does == "move" else plan.recomputed
    assert stats.plain_peak_bytes == 37 * 64 * X_BYTES
    found = course(events, [])
    assert found is not None
    begun_s = min(event.start_s for event in events)
    looked = 0
    for (start_s, before), (end_s, after) in pairwise(marks[number - 1]):
        inside = [nbytes for at_s, nbytes in found.plain if start_s <= begun_s + at_s < end_s]
        # An operator's tensor is let go of where the next one asks.
        assert all(min(before, after) <= each <= max(before, after) + X_BYTES * 64 * 2 for each in inside), (
            before,
            after,
        )
        looked += len(inside)
    assert looked > 12
    assert found.most_plain_bytes == stats.plain_peak_bytes
    # What is read back while its write still runs is in memory twice, on a slow disk.
    assert min(found.most_held_bytes, found.most_plain_bytes) <= stats.step_peak_bytes <= found.most_plain_bytes
    if does == "recompute":  # a block has six tensors, of which it saves the first as it is given it
        assert stats.step_peak_bytes >= found.most_held_bytes + 5 * 64 * X_BYTES


def test_only_some_micro_batches_are_recorded(scratch: Path) -> None:
    numbers = []
    with engine(scratch) as offload:
        for _ in range(9):
            _train(offload, steps=1)
            numbers.append(_read(offload, scratch).titles[0].rpartition(" ")[2])
    assert numbers == ["1", "2", "2", "4", "4", "4", "4", "8", "8"]


def test_forwards_without_a_backward_are_not_recorded_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tba._stats._MOST_EVENTS", 100)
    recorder = Recorder()

    def note(count: int) -> None:
        for number in range(count):
            recorder.note("saved", 0.0, 0.0, 1, f"#{number}")

    note(150)
    assert (recorder.trace, len(recorder.last), recorder.number) == (None, 100, 1)
    with recorder.region() as events:  # as long as it is asked for
        note(150)
    assert (len(events), recorder.number) == (150, 0)
    recorder.end_step()  # and with it what was cut short
    assert recorder.number == 0  # of the region
    note(1)
    recorder.end_step()
    assert recorder.number == 2


def test_a_course_is_pure_arithmetic() -> None:
    assert course([], []) is None
    events = [
        TraceEvent("plain", 10.0, 10.0, 8 * MIB, ""),
        TraceEvent("held", 10.0, 10.0, 8 * MIB, ""),
        TraceEvent("write", 10.5, 11.0, 8 * MIB, "float32[2] #1"),
        TraceEvent("write", 10.8, 12.0, 4 * MIB, "float32[2] #7"),
        TraceEvent("held", 12.0, 12.0, 0, ""),
        TraceEvent("plain", 13.0, 13.0, 0, ""),
        TraceEvent("write", 14.0, 15.0, 1 * MIB, "float32[2] #8"),
    ]
    found = course(events, ["write", "read"])
    assert found is not None
    assert (found.seconds, found.most_plain_bytes, found.most_held_bytes) == (5.0, 8 * MIB, 8 * MIB)
    assert found.spans == {"write": [(0.5, 2.0), (4.0, 5.0)], "read": []}
    assert found.nbytes == {"write": 13 * MIB, "read": 0}
    assert found.plain[-1] == (3.0, 0)


def test_a_peak_is_never_thinned_out() -> None:
    points = [(number / 1e5, number % 977) for number in range(100_000)]
    shown = thinned(points, 1.0)
    assert len(shown) < 1000
    assert max(nbytes for _, nbytes in shown) == 976
    assert shown[-1] == points[-1]


def test_a_plan_is_shown(scratch: Path) -> None:
    with engine(scratch, tier="auto", memory_budget=4 * X_BYTES) as offload:
        _train(offload, steps=4)
        page = _read(offload, scratch)
        assert offload.plan
        assert "Plan" in page.titles
        assert ["budget", size(4 * X_BYTES), "50%"] in page.rows
        assert page.paths == 6


@pytest.mark.filterwarnings("ignore::tba.OffloadWarning")
def test_where_nothing_moves_the_page_says_so(scratch: Path) -> None:
    with engine(scratch, tier="keep") as offload:
        _train(offload)
        page = _read(offload, scratch)
        assert page.titles == ["Memory and transfers", "Bytes by class", "Plan", "Settings"]
        assert page.paths == 0


def test_what_cannot_be_reported_is_told(scratch: Path) -> None:
    with engine(scratch) as offload:
        with pytest.raises(ConfigError, match="nothing has been saved inside this context yet; run a step in it"):
            offload.report(scratch / "out.html")
        _train(offload, steps=1)
        with pytest.raises(ConfigError, match=r"'.*out\.pdf', must end in \.html"):
            offload.report(scratch / "out.pdf")
        with pytest.raises(ConfigError, match=r"there is no directory .*/none; create it"):
            offload.report(scratch / "none" / "out.html")
    assert list(scratch.iterdir()) == []


CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
# Of the style sheet: what is in memory, and what goes out.
COLOURS = {"light": ("#0072b2", "#e69f00"), "dark": ("#56b4e9", "#e69f00")}


@pytest.mark.skipif(CHROMIUM is None, reason="there is no chromium: apt-get install chromium")
@pytest.mark.parametrize("scheme", COLOURS)
def test_a_browser_draws_it(scratch: Path, scheme: str) -> None:
    with engine(scratch) as offload:
        _train(offload)
        page = _read(offload, scratch)
    picture = scratch / "page.png"
    command = [
        *(str(CHROMIUM), "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--window-size=1100,900"),
        *(f"--user-data-dir={scratch / 'profile'}", f"--blink-settings=preferredColorScheme={int(scheme == 'light')}"),
    ]
    url = (scratch / "out.html").as_uri()
    dom = subprocess.run([*command, "--dump-dom", url], capture_output=True, text=True, check=True, timeout=120).stdout
    assert Page(dom).rows == page.rows  # a browser repairs what is not well-formed
    subprocess.run([*command, f"--screenshot={picture}", url], capture_output=True, check=True, timeout=120)
    pixels = (imread(picture)[..., :3] * 255).round().astype(int).reshape(-1, 3)
    for colour in COLOURS[scheme]:
        rgb = [int(colour[place : place + 2], 16) for place in (1, 3, 5)]
        assert (abs(pixels - rgb).max(axis=1) <= 2).sum() > 20, colour
    light = pixels.mean() > 128
    assert light == (scheme == "light")
