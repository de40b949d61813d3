"""Sizes: counts of bytes as text for people."""

from __future__ import annotations

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


def size(nbytes: float) -> str:
    """Format a count of bytes: "512 B", "1.5 KiB", "12.0 MiB". A negative one keeps its sign."""
    amount, unit = float(nbytes), 0
    while abs(amount) >= 1024 and unit < len(_UNITS) - 1:
        amount, unit = amount / 1024, unit + 1
    return f"{amount:.1f} {_UNITS[unit]}" if unit else f"{amount:.0f} B"
