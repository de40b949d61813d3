"""Report of a forecast: one screen for people."""

from __future__ import annotations

from collections.abc import Iterator

from .._text import as_text, numbers, size
from .forecast import COMPARED, Forecast
from .together import Together

_MOST_YEARS = 100


def report(together: Together, name: str = "", largest: str = "") -> str:
    """Format a forecast: what it took and whether it fits, what each rank does, each policy, memory and bytes.

    Where ranks differ, policies, memory and bytes are those of the first.

    Args:
        together: the forecast.
        name: what the user called the model.
        largest: what a search has found, in a line.
    """
    found, several = together.hardest, together.group.world > 1
    head = [_took(together, name), _verdict(found), *([largest] if largest else []), ""]
    ranks = [as_text(list(_ranks(together)), _agreed(together)), ""] if several else []
    table = as_text(list(_rows(together)), _notes(together))
    return "\n".join([*head, *ranks, as_text(list(_ways(found))), "", table])


def _took(together: Together, name: str) -> str:
    found, group = together.hardest, together.group
    seen = found.observed
    batch = " x ".join(f"{each:,}" for each in seen.batch) + (" tokens" if seen.tokens else "")
    ranks = f"; {group}" if group.world > 1 else ""
    disk = "no disk" if found.disk is None else found.disk.name
    if found.disk is not None and found.disk.ranks > 1:
        disk += f" for {found.disk.ranks} ranks"
    return (
        f"{name or seen.model}: {seen.model}, {_count(seen.parameters)} parameters, {seen.dtype}; batch {batch}; "
        f"{found.optimizer}{ranks}; {found.device.name} with {size(found.device.memory_bytes)}, {disk}"
    )


def _verdict(found: Forecast) -> str:
    if found.problem:
        return f"DOES NOT FIT: {found.problem}"
    card, auto = size(found.device.memory_bytes), found.plan
    peak = f"peak {size(found.peak_bytes(auto))} of {card}"
    if auto.idle:
        return f"FITS without offloading: {peak}"
    return f"FITS under tier auto: {peak}, step {found.step_s(auto) / found.step_s(found.ways['plain']):.2f}x plain's"


def _ranks(together: Together) -> Iterator[tuple[str, ...]]:
    yield "", "keeps", "moves", "recomputes", "blocks", "peak memory", "step"
    for each in together.alike:
        found, plan, fates = each.forecast, each.forecast.plan, each.forecast.fates
        name = f"rank{'s' * (len(each.ranks) > 1)} {numbers(each.ranks)}"
        kept, moved, again = (
            size(nbytes) for nbytes in (fates["small"] + fates["kept"], fates["moved"], fates["recomputed"])
        )
        blocks = f"{len(plan.recomputed)} of {len(plan.facts.blocks)}"
        yield name, kept, moved, again, blocks, size(found.peak_bytes(plan)), _seconds(found.step_s(plan))


def _agreed(together: Together) -> Iterator[str]:
    yield from dict.fromkeys(agreed for each in together.alike if (agreed := each.forecast.plan.agreed))


def _ways(found: Forecast) -> Iterator[tuple[str, ...]]:
    plain_s = found.step_s(found.ways["plain"])
    yield "", "peak memory", "step", "x plain", "moved", ""
    for name, way in found.ways.items():
        step_s, peak_bytes = found.step_s(way), found.peak_bytes(way)
        missing_bytes = max(peak_bytes - found.device.memory_bytes, way.missing_bytes)
        fits = "fits" if found.fits(way) else f"does not fit: {size(missing_bytes)} too much"
        moved = size(way.predicted.moved_bytes)
        yield name, size(peak_bytes), _seconds(step_s), f"{step_s / plain_s:.2f}", moved, fits


def _rows(together: Together) -> Iterator[tuple[str, str, str]]:
    found, group = together.hardest, together.group
    own, plan, card = found.training, found.plan, found.device
    sharded = f"1 of {group.replica} parts" if group.replica > 1 else ""
    yield f"memory of {card.name} under auto", size(card.memory_bytes), ""
    yield "  weights", size(own.weights), sharded
    yield "  gradients", size(own.gradients), sharded
    yield f"  optimizer, {found.optimizer}", size(own.states), sharded
    if own.gathered:
        yield "  gathered weights", size(own.gathered), "3 blocks; what is in none, twice"
    yield "  operator workspace", size(own.work), "logits, small saved tensors, ..."
    yield "  saved tensors, planned", size(plan.predicted.peak.nbytes), f"of a budget of {size(plan.budget_bytes)}"
    yield "  peak", size(found.peak_bytes(plan)), found.binds()
    total = sum(found.fates.values())
    yield "a step saves", size(total), ""
    names = {
        "small": "  too small to move, kept",
        "recomputed": f"  recomputed, {len(plan.recomputed)} of {len(plan.facts.blocks)} blocks",
    }
    for fate, nbytes in found.fates.items():
        yield names.get(fate, f"  {fate}"), size(nbytes), f"{nbytes / total:.0%}" if total else ""
    low, high = found.errors
    step_s = together.step_s
    yield "expected measured step", f"{_seconds(low * step_s)} to {_seconds(high * step_s)}", ""
    if found.observed.tokens:
        rate, whose = together.tokens_per_s, ", all ranks" if group.world > 1 else ""
        yield f"tokens per second{whose}", f"{rate:,.0f}", f"{rate / high:,.0f} to {rate / low:,.0f}"
    if found.disk is not None:
        yield f"{found.disk.name} writes", f"{found.written_bytes_per_day / 1e12:.1f} TB a day", "continuous steps"
        years = found.years
        known = "no writes" if not found.written_bytes_per_day else "unknown"
        lives = known if years is None else _years(years)
        spread = "" if years is None else f"{_years(low * years)} to {_years(high * years)}"
        yield "  its endurance lasts", lives, spread


def _notes(together: Together) -> Iterator[str]:
    found, group = together.hardest, together.group
    where = "on published runs on H100 and A100" if found.device.like_cuda else "on a machine measured this way"
    low, high = found.errors
    yield ""
    if found.device.like_cuda:
        yield f"Times are forecast for {found.device.name} from {found.device.source}."
        if found.device.name not in COMPARED:
            yield f"No forecast for {found.device.name} was compared with a real step, only forecasts for other cards:"
    yield f"Steps took {low:.2f} to {high:.2f} of their forecast {where}. Saved bytes are counted, not estimated."
    if group.world > 1:
        yield "Times do not include communication between ranks."
    if group.fsdp > 1:
        yield "FSDP is taken to wrap each block and the whole model, and to prefetch one block."
    if group.tensor > 1:
        yield "Layers are cut by the model's tp_plan; a batch is that of the ranks that share them."
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
