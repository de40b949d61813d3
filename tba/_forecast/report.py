"""Report of a forecast: one screen for people."""

from __future__ import annotations

from collections.abc import Iterator

from .._plan.plan import Plan
from .._text import as_text, size
from .forecast import COMPARED, Forecast

_MOST_YEARS = 100


def report(found: Forecast) -> str:
    """Format a forecast."""
    return as_text(list(_rows(found)), _notes(found))


def _rows(found: Forecast) -> Iterator[tuple[str, str, str]]:
    own, plan, card = found.training, found.plan, found.device
    facts = plan.facts
    sharded = f"of {found.shards} shards" if found.shards > 1 else ""
    yield f"memory of {card.name}", size(card.memory_bytes), ""
    yield "  weights", size(own.weights), sharded
    yield "  gradients", size(own.gradients), sharded
    yield f"  optimizer, {found.optimizer}", size(own.states), sharded
    if own.gathered:
        yield "  gathered blocks", size(own.gathered), ""
    yield "  operator workspace", size(own.work), "logits, small saved tensors, ..."
    yield "  saved tensors, planned", size(plan.predicted.peak.nbytes), f"of a budget of {size(plan.budget_bytes)}"
    yield "  peak", size(found.peak_bytes), found.binds()
    sent = sum(plan.sends.values())
    gone = sum(facts.block_bytes(block) for block in plan.recomputed)
    total = facts.saved_bytes
    yield "a step saves", size(total), ""
    for name, nbytes in (
        ("  kept", total - sent - gone),
        ("  moved", sent),
        (f"  recomputed, {len(plan.recomputed)} of {len(facts.blocks)} blocks", gone),
    ):
        yield name, size(nbytes), f"{nbytes / total:.0%}" if total else ""
    low, high = found.errors
    kept_s = found.step_s(found.ways["all kept"])
    for name, way in found.ways.items():
        step_s = found.step_s(way)
        yield f"step, {name}", _seconds(step_s), f"{step_s / kept_s:.2f}x{_fits(way)}"
    step_s = found.step_s(plan)
    yield "  expected measured step", f"{_seconds(low * step_s)} to {_seconds(high * step_s)}", ""
    if found.observed.tokens:
        rate = found.observed.tokens / step_s
        yield "tokens per second", f"{rate:,.0f}", f"{rate / high:,.0f} to {rate / low:,.0f}"
    if found.disk is not None:
        yield f"{found.disk.name} writes", f"{found.written_bytes_per_day / 1e12:.1f} TB a day", "continuous steps"
        years = found.years
        lives = "no writes" if years is None else _years(years)
        spread = "" if years is None else f"{_years(low * years)} to {_years(high * years)}"
        yield "  its endurance lasts", lives, spread


def _fits(way: Plan) -> str:
    if way.fits:
        return ""
    return f", does not fit: {size(way.missing_bytes)} too much"


def _notes(found: Forecast) -> Iterator[str]:
    where = "on published runs on H100 and A100" if found.device.like_cuda else "on a machine measured this way"
    low, high = found.errors
    yield ""
    if found.device.like_cuda:
        yield f"Times are forecast for {found.device.name} from {found.device.source}."
        if found.device.name not in COMPARED:
            yield f"No forecast for {found.device.name} was compared with a real step, only forecasts for other cards:"
    yield f"Steps took {low:.2f} to {high:.2f} of their forecast {where}. Saved bytes are counted, not estimated."
    if found.shards > 1:
        yield "Times do not include communication between shards."
    if found.disk is not None:
        yield f"Disk: {found.disk.count} x {found.disk.source}."


def _seconds(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{1000 * seconds:.1f} ms"


def _years(years: float) -> str:
    if years > _MOST_YEARS:
        return f"over {_MOST_YEARS} years"
    return f"{years:.1f} years" if years >= 1 else f"{365 * years:.0f} days"
