"""Machines: cards with their links to the host and one to eight drives, by public figures; none was measured."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from tba._forecast.forecast import facts_on
from tba._forecast.hardware import Device, Disk, device_named, disk_named
from tba._forecast.observe import Observed
from tba._plan.facts import Facts

DRIVES = (1, 2, 4, 8)
HOST = 0  # drives: what leaves goes to the host's memory


@dataclass(frozen=True)
class Machine:
    """A card, what links it to the host, and the generation of its own drives."""

    card: str
    link: str
    drive: str
    device: Device

    def disk(self, drives: int) -> Disk:
        """Drives of its generation, striped; or the host's memory, which is as fast as the link and does not wear."""
        if drives == HOST:
            rate = self.device.link_bytes_per_s
            return Disk("host", rate, rate, math.inf, "the host's memory")
        found = disk_named(f"{self.drive}x{drives}")
        assert found is not None
        return found

    def facts(self, observed: Observed, drives: int) -> Facts:
        """Facts of a step that was observed on its card."""
        return facts_on(observed, self.device, self.disk(drives))


_CARDS = {
    "rtx4060-laptop": ("PCIe 4 x8", "gen4"),
    "rtx3090": ("PCIe 4", "gen4"),
    "rtx4090": ("PCIe 4", "gen4"),
    "rtx5090": ("PCIe 5", "gen5"),
    "l40s": ("PCIe 4", "gen4"),
    "a100": ("PCIe 4", "gen4"),
    "h100-pcie": ("PCIe 5", "gen5"),
    "h100": ("PCIe 5", "gen5"),
    "h200": ("PCIe 5", "gen5"),
    "b200": ("PCIe 5", "gen5"),
    "b300": ("PCIe 6", "gen6"),
    "gh200": ("C2C", "gen5"),
    "gh200-144": ("C2C", "gen5"),
    "gb200": ("C2C / 2", "gen5"),
}
MACHINES = {card: Machine(card, link, drive, device_named(card)) for card, (link, drive) in _CARDS.items()}

_LINKED = "h100"
# Each as many times as fast as PCIe 5, the card's own; and the drives of that generation.
_LINKS = {
    "PCIe 3": (1 / 4, "gen3"),
    "PCIe 4": (1 / 2, "gen4"),
    "PCIe 5": (1.0, "gen5"),
    "PCIe 6": (2.0, "gen6"),
    "C2C": (450 / 64, "gen6"),
}


def linked() -> list[Machine]:
    """One card on each link in turn, as if it had been built with it."""
    device = device_named(_LINKED)
    return [
        Machine(_LINKED, link, drive, replace(device, link_bytes_per_s=times * device.link_bytes_per_s))
        for link, (times, drive) in _LINKS.items()
    ]
