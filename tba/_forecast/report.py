"""Report of a forecast: one screen for people."""

from __future__ import annotations

from collections.abc import Iterator

from .._text import as_text, size
from .forecast import COMPARED, Forecast

_MOST_YEARS = 100


def report(found: Forecast, name: str = "", largest: str = "") -> str:
    """Format a forecast: what it took and whether it fits, each policy, memory and bytes under the plan.

    Args:
        found: the forecast.
        name: what the user called the model.
        largest: what a search has found, in a line.
    """
    head = [_took(found, name), _verdict(found), *([largest] if largest else []), ""]
    return "\n".join([*head, as_text(list(_ways(found))), "", as_text(list(_rows(found)), _notes(found))])


def _took(found: Forecast, name: str) -> str:
    seen = found.observed
    batch = " x ".join(f"{each:,}" for each in seen.batch) + (" tokens" if seen.tokens else "")
    shards = f", {found.shards} shards" if found.shards > 1 else ""
    disk = "no disk" if found.disk is None else found.disk.name
    if found.disk is not None and found.disk.ranks > 1:
        disk += f" for {found.disk.ranks} ranks"
    return (
        f"{name or seen.model}: {seen.model}, {_count(seen.parameters)} parameters, {seen.dtype}; batch {batch}; "
        f"{found.optimizer}{shards}; {found.device.name} with {size(found.device.memory_bytes)}, {disk}"
    )


def _verdict(found: Forecast) -> str:
    if found.problem:
        return f"DOES NOT FIT: {found.problem}"
    card, auto = size(found.device.memory_bytes), found.plan
    peak = f"peak {size(found.peak_bytes(auto))} of {card}"
    if auto.idle:
        return f"FITS without offloading: {peak}"
    return f"FITS under tier auto: {peak}, step {found.step_s(auto) / found.step_s(found.ways['plain']):.2f}x plain's"


def _ways(found: Forecast) -> Iterator[tuple[str, ...]]:
    plain_s = found.step_s(found.ways["plain"])
    yield "", "peak memory", "step", "x plain", "moved", ""
    for name, way in found.ways.items():
        step_s, peak_bytes = found.step_s(way), found.peak_bytes(way)
        missing_bytes = max(peak_bytes - found.device.memory_bytes, way.missing_bytes)
        fits = "fits" if found.fits(way) else f"does not fit: {size(missing_bytes)} too much"
        moved = size(way.predicted.moved_bytes)
        yield name, size(peak_bytes), _seconds(step_s), f"{step_s / plain_s:.2f}", moved, fits


def _rows(found: Forecast) -> Iterator[tuple[str, str, str]]:
    own, plan, card = found.training, found.plan, found.device
    facts, small = plan.facts, found.observed.small_bytes
    sharded = f"of {found.shards} shards" if found.shards > 1 else ""
    yield f"memory of {card.name} under auto", size(card.memory_bytes), ""
    yield "  weights", size(own.weights), sharded
    yield "  gradients", size(own.gradients), sharded
    yield f"  optimizer, {found.optimizer}", size(own.states), sharded
    if own.gathered:
        yield "  gathered blocks", size(own.gathered), ""
    yield "  operator workspace", size(own.work), "logits, small saved tensors, ..."
    yield "  saved tensors, planned", size(plan.predicted.peak.nbytes), f"of a budget of {size(plan.budget_bytes)}"
    yield "  peak", size(found.peak_bytes(plan)), found.binds()
    sent = sum(plan.sends.values())
    gone = sum(facts.block_bytes(block) for block in plan.recomputed)
    total = facts.saved_bytes + small
    yield "a step saves", size(total), ""
    for name, nbytes in (
        ("  too small to move, kept", small),
        ("  kept", total - small - sent - gone),
        ("  moved", sent),
        (f"  recomputed, {len(plan.recomputed)} of {len(facts.blocks)} blocks", gone),
    ):
        yield name, size(nbytes), f"{nbytes / total:.0%}" if total else ""
    low, high = found.errors
    step_s = found.step_s(plan)
    yield "expected measured step", f"{_seconds(low * step_s)} to {_seconds(high * step_s)}", ""
    if found.observed.tokens:
        rate = found.observed.tokens / step_s
        yield "tokens per second", f"{rate:,.0f}", f"{rate / high:,.0f} to {rate / low:,.0f}"
    if found.disk is not None:
        yield f"{found.disk.name} writes", f"{found.written_bytes_per_day / 1e12:.1f} TB a day", "continuous steps"
        years = found.years
        known = "no writes" if not found.written_bytes_per_day else "unknown"
        lives = known if years is None else _years(years)
        spread = "" if years is None else f"{_years(low * years)} to {_years(high * years)}"
        yield "  its endurance lasts", lives, spread


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


def _count(number: int) -> str:
    """Write a count in three figures: "6.74 billion"."""
    for factor, word in ((1e9, " billion"), (1e6, " million"), (1e3, " thousand")):
        if number >= factor:
            return f"{number / factor:.3g}{word}"
    return str(number)


def _seconds(seconds: float) -> str:
    if seconds >= 1:
        return f"{seconds:.2f} s"
    return f"{1e3 * seconds:.1f} ms" if seconds >= 1e-4 or not seconds else f"{1e6 * seconds:.1f} us"


def _years(years: float) -> str:
    if years > _MOST_YEARS:
        return f"over {_MOST_YEARS} years"
    return f"{years:.1f} years" if years >= 1 else f"{365 * years:.0f} days"
