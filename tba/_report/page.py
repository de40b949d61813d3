"""Page of a report: one self-contained HTML document, for light and dark screens."""

from __future__ import annotations

import html
import json
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from .._config import Setting
from .._plan.no_plan import NoPlan
from .._plan.plan import Plan
from .._stats import OffloadStats, TraceEvent
from .._text import size, value_text
from .charts import Line, Row, bars, legend, memory, timeline
from .course import Course, course, thinned


class Contents(NamedTuple):
    """What a page shows.

    Attributes:
        title: what was trained, and the tier of its tensors.
        about: versions and the time, for the footer.
        events: of one recorded region.
        number: of the micro-batch that was recorded; 0 for a region inside `trace()`.
    """

    title: str
    about: str
    stats: OffloadStats
    settings: Sequence[Setting]
    events: Sequence[TraceEvent]
    number: int
    plan: Plan | NoPlan


# Rows of the timeline, from the top: kind of event, label, color.
_ROWS = (
    ("write", "writes", "out"),
    ("room", "fwd waits", "wait"),
    ("read", "reads", "back"),
    ("wait", "bwd waits", "wait"),
)
_CLASSES = (
    ("handed to the tier", "out", "offloaded_bytes"),
    ("kept", "held", "kept_bytes"),
    ("saved before", "again", "duplicate_bytes"),
    ("weights, left alone", "weight", "weight_bytes"),
)
# The Okabe-Ito palette, which every kind of color vision can tell apart; lighter in the dark where needed.
_STYLE = """
:root{color-scheme:light dark;--page:#fbfbfa;--card:#fff;--text:#1c1e21;--soft:#5d646c;--rule:#e2e4e6;--track:#f0f1f2;
--held:#0072b2;--plain:#5d646c;--out:#e69f00;--back:#009e73;--wait:#d55e00;--again:#cc79a7;--weight:#bbbbbb}
@media (prefers-color-scheme:dark){:root{--page:#15171a;--card:#1d2024;--text:#e8eaed;--soft:#9aa2ab;--rule:#33383e;
--track:#282c31;--held:#56b4e9;--plain:#9aa2ab;--back:#1fbf92;--wait:#f0762b;--weight:#70767d}}
*{box-sizing:border-box}
body{margin:0;background:var(--page);color:var(--text);
font:15px/1.5 system-ui,"Segoe UI",Roboto,"DejaVu Sans",sans-serif}
main{max-width:1040px;margin:0 auto;padding:32px 20px 48px}
h1{font-size:24px;font-weight:650;margin:0 0 2px}
h2{font-size:16px;font-weight:650;margin:0 0 10px}
p{margin:6px 0 0;color:var(--soft)}
.verdict{font-size:17px;font-weight:600;color:var(--text)}
.cards{display:grid;grid-template-columns:repeat(auto-fit,minmax(200px,1fr));gap:14px;margin:22px 0 14px}
.cards div,section{background:var(--card);border:1px solid var(--rule);border-radius:10px}
.cards div{padding:14px 16px}
.cards b{display:block;font-size:24px;font-weight:650;line-height:1.25;font-variant-numeric:tabular-nums}
.cards span{color:var(--soft);font-size:13px}
section{padding:18px 20px;margin-top:14px;overflow-x:auto}
svg{display:block;width:100%;height:auto;font:12px system-ui,"Segoe UI",Roboto,"DejaVu Sans",sans-serif}
.grid{stroke:var(--rule);stroke-width:1}.track{fill:var(--track)}.tick{fill:var(--soft)}.label{fill:var(--text)}
.legend{display:flex;flex-wrap:wrap;gap:4px 18px;margin:8px 0 0;font-size:13px;color:var(--soft)}
.legend i{display:inline-block;width:11px;height:11px;border-radius:2px;margin-right:6px}
table{border-collapse:collapse;font-size:14px;font-variant-numeric:tabular-nums}
th{font-weight:600;text-align:left}th,td{padding:3px 18px 3px 0;border-bottom:1px solid var(--rule)}
tr:last-child td{border-bottom:0}
.note{border-left:3px solid var(--wait);padding-left:10px;color:var(--text)}
code{font:13px ui-monospace,"DejaVu Sans Mono",monospace}
footer{margin-top:18px;font-size:13px;color:var(--soft)}
"""


def page(contents: Contents) -> str:
    """Write the page."""
    stats = contents.stats
    seen = course(contents.events, [kind for kind, _, _ in _ROWS])
    sections = [
        *_course(seen, contents.number, contents.plan),
        _classes(stats),
        _plan(contents.plan),
        _settings(contents.settings),
    ]
    data = {
        "stats": stats.asdict(),
        "settings": [[each.name, str(each.value), each.origin] for each in contents.settings],
    }
    title = html.escape(contents.title)
    return "\n".join(
        [
            '<!doctype html>\n<html lang="en"><head><meta charset="utf-8"/>',
            '<meta name="viewport" content="width=device-width, initial-scale=1"/>',
            f"<title>tba: {title}</title><style>{_STYLE}</style></head><body><main>",
            f"<h1>{title}</h1>",
            f'<p class="verdict">{html.escape(stats.verdict)}</p>',
            f"<p>{stats.steps:,} steps, {stats.micro_batches:,} micro-batches, {stats.step_s:,.1f} s</p>",
            f'<div class="cards">{"".join(_cards(stats))}</div>',
            *(f'<p class="note">{html.escape(note)}</p>' for note in stats.notes()),
            *sections,
            f"<footer>{html.escape(contents.about)}</footer>",
            f'<script type="application/json" id="data">{_json(data)}</script>',
            "</main></body></html>\n",
        ]
    )


def _cards(stats: OffloadStats) -> Iterator[str]:
    last = stats.last_step or stats
    yield _card(
        size(stats.step_peak_bytes), f"most in memory at once, of {size(stats.plain_peak_bytes)} in plain PyTorch"
    )
    yield _card(size(last.written_bytes), "written in the last step" if stats.last_step else "written")
    yield _card(size(last.read_bytes), "read back in the last step" if stats.last_step else "read back")
    waited_s = last.wait_s + last.backpressure_s
    yield _card(f"{waited_s / last.step_s:.1%}" if last.step_s else "0%", "of the step waited for the tier")


def _card(figure: str, text: str) -> str:
    return f"<div><b>{html.escape(figure)}</b><span>{html.escape(text)}</span></div>"


def _course(seen: Course | None, number: int, plan: Plan | NoPlan) -> Iterator[str]:
    if seen is None:
        yield _section("Memory and transfers", "<p>No tensor was handed to the tier, so there is nothing to draw.</p>")
        return
    which = f"micro-batch {number:,}" if number else "the region inside trace()"
    lines = [
        Line("in memory, beside what blocks recompute" if plan and plan.recomputed else "in memory", "held", seen.held),
        Line("in plain PyTorch", "plain", seen.plain, filled=False),
    ]
    key = legend([(line.label, line.colour) for line in lines])
    yield _section(f"Saved tensors in memory, {which}", memory(lines, seen.seconds) + key)
    rows = [Row(label, colour, seen.spans[kind]) for kind, label, colour in _ROWS]
    text = f"<p>{size(seen.nbytes['write'])} written, {size(seen.nbytes['read'])} read back.</p>"
    yield _section(f"Transfers and waits, {which}", timeline(rows, seen.seconds) + text)


def _classes(stats: OffloadStats) -> str:
    columns = [stats] if stats.last_step is None else [stats, stats.last_step]
    parts = [(label, colour, [getattr(each, name) for each in columns]) for label, colour, name in _CLASSES]
    parts = [part for part in parts if any(part[2])]
    chart = bars(["total", "last step"][: len(columns)], parts)
    table = "<table>" + stats._repr_html_().partition("<table>")[2].partition("</table>")[0] + "</table>"
    return _section("Bytes by class", chart + legend([part[:2] for part in parts]) + f"<br/>{table}")


def _plan(plan: Plan | NoPlan) -> str:
    if not plan:
        return _section("Plan", plan._repr_html_())
    seconds = plan.predicted.step_s
    points = [(moment.at_s, moment.nbytes) for moment in plan.predicted.moments] or [(0.0, 0)]
    lines = [
        Line("in memory, as planned", "held", thinned(points, seconds)),
        Line("budget", "wait", [(0.0, plan.budget_bytes)], filled=False),
    ]
    key = legend([(line.label, line.colour) for line in lines])
    return _section("Plan", memory(lines, seconds) + key + f"<br/>{plan._repr_html_()}")


def _settings(settings: Sequence[Setting]) -> str:
    rows = "".join(
        f"<tr><td><code>{each.name}</code></td><td>{html.escape(value_text(each.value))}</td><td>{html.escape(each.origin)}</td></tr>"
        for each in settings
    )
    return _section("Settings", f"<table><tr><th>setting</th><th>value</th><th>from</th></tr>{rows}</table>")


def _section(title: str, inner: str) -> str:
    return f"<section><h2>{html.escape(title)}</h2>{inner}</section>"


def _json(data: Any) -> str:
    return json.dumps(data).replace("<", "\\u003c")
