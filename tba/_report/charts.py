"""Charts of a report: SVG with the colors of the page's style sheet."""

from __future__ import annotations

import html
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from .._text import size
from .course import Points, Spans

_WIDTH, _LEFT, _RIGHT = 960, 88, 14
_TOP, _FOOT = 10, 34
_ROW = 30
_MOST_TICKS = 6


class Line(NamedTuple):
    """Bytes over time: a step function, filled down to 0 or only a line."""

    label: str
    colour: str
    points: Points
    filled: bool = True


class Row(NamedTuple):
    """One row of spans."""

    label: str
    colour: str
    spans: Spans


def memory(lines: Sequence[Line], seconds: float, *, height: int = 260) -> str:
    """Draw bytes over time; the last amount of each line holds until the end."""
    most = max((nbytes for line in lines for _, nbytes in line.points), default=0)
    step = _byte_step(most)
    bottom = height - _FOOT
    scale = (bottom - _TOP) / max(step, 1.06 * most)

    def y(nbytes: float) -> float:
        return bottom - scale * nbytes

    parts = list(_seconds_axis(seconds, bottom))
    for count in range(int(1.06 * most // step) + 1):
        at = y(count * step)
        parts.append(f'<line class="grid" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{at:.1f}" y2="{at:.1f}"/>')
        parts.append(_text("tick", _LEFT - 8, at + 4, size(count * step)))
    for line in lines:
        steps = "".join(f"H{_x(at_s, seconds):.1f}V{y(nbytes):.1f}" for at_s, nbytes in line.points)
        path = f"M{_LEFT} {y(line.points[0][1]):.1f}{steps}H{_WIDTH - _RIGHT}"
        if line.filled:
            area = f"{path}V{bottom}H{_LEFT}Z"
            parts.append(f'<path d="{area}" fill="var(--{line.colour})" fill-opacity="0.28" stroke="none"/>')
        dash = "" if line.filled else ' stroke-dasharray="5 4"'
        parts.append(f'<path d="{path}" fill="none" stroke="var(--{line.colour})" stroke-width="1.6"{dash}/>')
    return _svg(parts, height, "bytes over time: " + ", ".join(line.label for line in lines))


def timeline(rows: Sequence[Row], seconds: float) -> str:
    """Draw when something was in progress, a row for each kind."""
    bottom = _TOP + _ROW * len(rows)
    parts = list(_seconds_axis(seconds, bottom))
    for number, row in enumerate(rows):
        top = _TOP + _ROW * number
        parts.append(_text("label", _LEFT - 8, top + 19, row.label))
        parts.append(
            f'<rect class="track" x="{_LEFT}" y="{top + 4}" width="{_WIDTH - _LEFT - _RIGHT}" height="{_ROW - 8}"/>'
        )
        for start_s, end_s in row.spans:
            left = _x(start_s, seconds)
            width = max(0.8, _x(end_s, seconds) - left)
            text = f"{row.label}: {start_s:.3f} to {end_s:.3f} s"
            parts.append(_bar(left, top, width, row.colour, text))
    return _svg(parts, bottom + _FOOT, "timeline: " + ", ".join(row.label for row in rows))


def bars(names: Sequence[str], parts: Sequence[tuple[str, str, Sequence[int]]]) -> str:
    """Draw a bar for each name, made of parts: label, color and bytes in each bar."""
    drawn = []
    for number, name in enumerate(names):
        top, left = _TOP + _ROW * number, float(_LEFT)
        whole = sum(max(0, nbytes[number]) for _, _, nbytes in parts) or 1
        drawn.append(_text("label", _LEFT - 8, top + 19, name))
        for label, colour, nbytes in parts:
            width = (_WIDTH - _LEFT - _RIGHT) * max(0, nbytes[number]) / whole
            text = f"{label}: {size(nbytes[number])}, {nbytes[number] / whole:.1%}"
            drawn.append(_bar(left, top, width, colour, text))
            left += width
    return _svg(drawn, _TOP + _ROW * len(names) + 4, "bytes by class: " + ", ".join(label for label, _, _ in parts))


def legend(entries: Sequence[tuple[str, str]]) -> str:
    """List labels with their colors."""
    keys = (f'<span><i style="background:var(--{colour})"></i>{html.escape(label)}</span>' for label, colour in entries)
    return f'<div class="legend">{"".join(keys)}</div>'


def _text(kind: str, x: float, y: float, text: str, *, anchor: str = "end") -> str:
    return f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{html.escape(text)}</text>'


def _bar(left: float, top: float, width: float, colour: str, text: str) -> str:
    place = f'x="{left:.1f}" y="{top + 4}" width="{width:.1f}" height="{_ROW - 8}"'
    return f'<rect {place} fill="var(--{colour})"><title>{html.escape(text)}</title></rect>'


def _svg(parts: Sequence[str], height: float, label: str) -> str:
    return (
        f'<svg viewBox="0 0 {_WIDTH} {height:g}" role="img" aria-label="{html.escape(label)}" '
        f'xmlns="http://www.w3.org/2000/svg">{"".join(parts)}</svg>'
    )


def _x(at_s: float, seconds: float) -> float:
    return _LEFT + (_WIDTH - _LEFT - _RIGHT) * (at_s / seconds if seconds else 0.0)


def _seconds_axis(seconds: float, bottom: float) -> Iterator[str]:
    step = _decimal_step(seconds)
    digits = max(0, -int(f"{step:e}".partition("e")[2]))
    for count in range(int(seconds / step + 1e-9) + 1):
        at = _x(count * step, seconds)
        yield f'<line class="grid" x1="{at:.1f}" x2="{at:.1f}" y1="{_TOP}" y2="{bottom}"/>'
        yield _text("tick", at, bottom + 18, f"{count * step:.{digits}f} s", anchor="middle")


def _decimal_step(most: float) -> float:
    """Return the smallest of 1, 2 and 5 times a power of 10 that divides `most` into a few steps."""
    step = 10.0 ** int(f"{max(most, 1e-9) / _MOST_TICKS:e}".partition("e")[2])
    return next(step * times for times in (1, 2, 5, 10) if step * times * _MOST_TICKS >= max(most, 1e-9))


def _byte_step(most: int) -> int:
    """Return the smallest power of 2 that divides `most` into a few steps."""
    step = 1
    while step * _MOST_TICKS < most:
        step *= 2
    return step
