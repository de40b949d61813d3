"""The report of what is filed: one page that says how much memory, at what cost, compared with what, where and how.

It reads `results/` and measures nothing: HTML with its pictures inside, and Markdown for the docs.
"""

from __future__ import annotations

import base64
import html
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from markdown_it import MarkdownIt

from ._pictures.curves import TITLE, Panel, draw_curves
from ._processes.device import CPU
from ._report.ratios import doubt, ratios
from ._report.results import RESULTS, Grid, Result
from .rok import own_arms, shares_panel, shares_table

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 72rem; margin: 2rem auto; padding: 0 1rem; color: #222; }
table { border-collapse: collapse; margin: 1rem 0; font-size: 13px; }
th, td { border-bottom: 1px solid #ddd; padding: .25rem .6rem; vertical-align: top; }
th { text-align: left; border-bottom: 2px solid #888; }
pre { background: #f4f4f4; padding: .6rem; overflow-x: auto; }
img { max-width: 100%; }
details { border-top: 1px solid #ccc; padding: .4rem 0; }
summary { cursor: pointer; font-weight: 600; }
"""
_OURS = ("offload nvme", "tba nvme", "nvme", "tba auto 0.40")
_AGAINST = ("plain", "checkpoint", "selective checkpoint", "torch_remat", "save_on_cpu", "tutorial's files")


@dataclass(frozen=True)
class Filed:
    """One filed result: its name, where it was measured, what it found, and its tables as Markdown."""

    theme: str
    machine: str
    document: Mapping[str, Any]
    markdown: str
    picture: Path | None

    @property
    def command(self) -> str:
        """The command that measures it again."""
        return str(self.document.get("command", ""))

    @property
    def environment(self) -> Mapping[str, str]:
        """What the numbers come from."""
        found: Mapping[str, str] = self.document.get("environment", {})
        return found


def read_filed(folder: Path = RESULTS) -> list[Filed]:
    """Read all that is filed in a folder, by name. A later month comes later."""
    found = []
    for path in sorted(folder.glob("*_*_*.md")):
        theme, machine, _ = path.stem.rsplit("_", 2)
        raw, picture = path.with_suffix(".json"), path.with_suffix(".png")
        document = json.loads(raw.read_text()) if raw.is_file() else {}
        found.append(Filed(theme, machine, document, path.read_text(), picture if picture.is_file() else None))
    return found


def run_report(out: Path, folder: Path = RESULTS) -> Result:
    """Write `report.html` and `report.md` of all that is filed."""
    filed = read_filed(folder)
    tables = [answers(filed), missed(filed), not_claimed(filed)]
    out.mkdir(parents=True, exist_ok=True)
    page, text, picture = out / "report.html", out / "report.md", out / "curves.png"
    files = [page, text]
    if panels := curves(filed):
        draw_curves(panels, picture, title=f"{TITLE}, of models at their own batch on 2 CPU cores")
        tables.insert(0, shares_table(panels))
        files.append(picture)
    page.write_text(to_html(filed, tables, picture if panels else None))
    text.write_text(to_markdown(filed, tables, picture if panels else None))
    data = {table.title: [list(row) for row in table.rows] for table in tables}
    return Result(theme="report", tables=tables, data=data, files=files)


def curves(filed: Sequence[Filed]) -> dict[str, Panel]:
    """Give each family of the results of `rok` on a CPU a panel; what is filed later stands for what was before."""
    found: dict[str, dict[str, Any]] = {}
    for one in filed:
        if one.theme.split("-")[0] == "rok" and "families" in one.document and "gpu" not in one.environment:
            found |= own_arms(one.document, CPU.size)
    return {name: shares_panel(arms) for name, arms in found.items()}


def answers(filed: Sequence[Filed]) -> Grid:
    """Answer in one screen: memory, cost, compared with what, on which machine, by which command."""
    rows = []
    for one in filed:
        for what, arms in _arm_groups(one.document):
            for name, other in _comparisons(arms):
                mine, theirs = arms[name], arms[other]
                against = ratios(mine["wall_s"], theirs["wall_s"])
                memory = f"{mine['peak_bytes'] / max(1, theirs['peak_bytes']):.2f}x"
                cost = f"{median(against):.3f}x ± {doubt(against):.3f}"
                rows.append((f"{one.theme}, {what}: {name}", memory, cost, other, one.machine, f"`{one.command}`"))
    heads = ("what", "peak memory", "time of a step", "compared with", "machine", "command")
    note = "Of the other's, each: below 1 is less. Behind ±: about 95 % confidence. Medians of ratios within a round."
    return Grid("How much memory, at what cost", heads, rows, note)


def _arm_groups(document: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Find the sets of arms in a result that trained beside each other, and what they trained."""
    for name, body in document.get("models", {}).items():
        yield name, body["arms"]
    families = document.get("families", {})
    for family, body in families.items():
        if "arms" in body:
            yield family, body["arms"]
            continue
        for batch, curve in body.items():
            yield f"{family}, batch {batch}", curve["arms"]
    if isinstance(document.get("arms"), dict) and "family" in document:
        yield str(document["family"]), document["arms"]


def _comparisons(arms: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    for name in _OURS:
        for other in _AGAINST:
            if name in arms and other in arms and len(arms[name]["wall_s"]) == len(arms[other]["wall_s"]) > 0:
                yield name, other


def missed(filed: Sequence[Filed]) -> Grid:
    """List every bar that a filed result does not keep."""
    rows = [
        (one.theme, bar["what"], f"{bar['sign']} {bar['limit']:g}", f"{bar['measured']:.3f}", one.machine)
        for one in filed
        for bar in _bars(one.document)
        if bar["met"] is False
    ]
    return Grid("Bars that are not met", ("result", "what", "bar", "measured", "machine"), rows)


def not_claimed(filed: Sequence[Filed]) -> Grid:
    """List what was measured and is not claimed, and what was not measured."""
    rows = []
    for one in filed:
        shown = [bar["what"] for bar in _bars(one.document) if bar["met"] is None]
        if shown:
            rows.append((one.theme, f"{len(shown)} values are shown and have no limit, such as {shown[0]}"))
        if "with changes" in one.environment.get("commit", ""):
            rows.append((one.theme, f"its tree was not committed: {one.environment['commit']}"))
        if "--quick" in one.command:
            rows.append((one.theme, "was run with --quick, which measures nothing"))
        for name, why in {**_words(one.document, "missing"), **_words(one.document, "failed")}.items():
            rows.append((one.theme, f"{name} was not measured: {why}"))
    if not any("gpu" in one.environment for one in filed):
        rows.append(("all", "nothing here ran on a GPU"))
    machines = sorted({f"{one.machine} ({one.environment['cpu']})" for one in filed if "cpu" in one.environment})
    if machines:
        rows.append(("all", f"times are of {', '.join(machines)}; another disk or processor has others"))
    return Grid("Measured and not claimed, and not measured", ("result", "what"), rows)


def _words(document: Mapping[str, Any], key: str) -> dict[str, str]:
    found = document.get(key, {})
    return {name: why for name, why in found.items() if isinstance(why, str)} if isinstance(found, dict) else {}


def _bars(value: Any) -> Iterator[Mapping[str, Any]]:
    """Find the bars in a result, however deep."""
    if isinstance(value, dict):
        if {"what", "measured", "limit", "met", "sign"} <= value.keys():
            yield value
            return
        value = list(value.values())
    if isinstance(value, list):
        for each in value:
            yield from _bars(each)


def to_markdown(filed: Sequence[Filed], tables: Sequence[Grid], picture: Path | None = None) -> str:
    """Write the report as Markdown: a picture beside it, its tables, and a line for each result."""
    lines = [
        f"- `{one.theme}` on {one.machine}, {one.environment.get('date', 'no date')}: "
        f"`{one.command or 'no command filed'}`"
        for one in filed
    ]
    shown = [f"![{TITLE}]({picture.name})"] if picture is not None else []
    parts = ["# What is measured", *shown, *(_below(table) for table in tables), "## Results", "\n".join(lines)]
    return "\n\n".join(parts) + "\n"


def _below(table: Grid) -> str:
    return table.markdown().replace("### ", "## ", 1)


def to_html(filed: Sequence[Filed], tables: Sequence[Grid], picture: Path | None = None) -> str:
    """Write the report as one HTML page that needs no other file, with a picture at its head."""
    render = MarkdownIt("commonmark", {"html": False}).enable("table").render
    head = "<h1>What is measured</h1>" + (_image(picture, TITLE) if picture is not None else "")
    parts = [head, *(render(table.markdown()) for table in tables), "<h2>Results</h2>"]
    for one in filed:
        date = one.environment.get("date", "")
        title = html.escape(f"{one.theme} on {one.machine} {date}")
        parts.append(f"<details><summary>{title}</summary>")
        if one.picture is not None:
            parts.append(_image(one.picture, title))
        parts.append(render(one.markdown) + "</details>")
    meta = f"<meta charset=utf-8><title>What is measured</title><style>{_STYLE}</style>"
    return f"<!doctype html><html lang=en><head>{meta}</head><body>{''.join(parts)}</body></html>\n"


def _image(path: Path, title: str) -> str:
    raw = base64.b64encode(path.read_bytes()).decode()
    return f'<img alt="{title}" src="data:image/png;base64,{raw}">'
