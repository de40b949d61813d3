"""Worth: whether recomputing a tensor takes the step less time than moving it out and back. Pure except for its notes.

A tensor is derived on the computing thread: in backward, and in forward too where each step compares it in full. What
its transfer would cost is measured step by step (`_transfer.cost`).

The first steps derive everything possible and measure each derivation's cost. From then on, those that cost more than
their transfer are dropped. Transfer costs decay slowly: on a saturated link, deriving relieves it; otherwise the link
would look free and saturate again, every other step.
"""

from __future__ import annotations

# Steps in which the order of reading is not known yet, at first and after derivations were dropped: backward waits for
# that reason, not for the link.
_SETTLING_STEPS = (1, 2, 4)
_FORGET = 0.9
_MOST_PLACES = 1 << 16  # with known costs: sizes may differ from step to step


class Worth:
    """Costs of derivations, by their place in the step, and of transfers.

    Args:
        on_disk: transfers go to a disk; otherwise deriving saves memory, whatever it costs.
        leaves: derivations that do not pay may be dropped; otherwise every one counts as paying.

    Attributes:
        steps: how many have ended.
        derive_s, derived_bytes: cost of the last step's derivations, and the bytes they gave.
        leaves: whether a derivation that does not pay is dropped, so that its cost is to be noted.
    """

    def __init__(self, *, on_disk: bool, leaves: bool) -> None:
        self._on_disk = on_disk
        self.steps = 0
        self.derive_s, self.derived_bytes = 0.0, 0
        self._noted_s, self._noted_bytes = 0.0, 0  # of this step
        self.leaves = leaves and on_disk
        self._derive_s: dict[tuple[int, int], float] = {}
        self._transfer_s_per_byte: float | None = None

    @property
    def settled(self) -> bool:
        """Whether the last step shows what transfers to a disk cost."""
        return self._on_disk and self.steps > 0 and self.steps not in _SETTLING_STEPS

    def pays(self, place: int, nbytes: int) -> bool:
        """Whether to derive the tensor of this size at this place; also if a cost is not known yet."""
        derive_s = self._derive_s.get((place, nbytes))
        if not self.leaves or derive_s is None or self._transfer_s_per_byte is None:
            return True
        return derive_s <= nbytes * self._transfer_s_per_byte

    def note(self, place: int, nbytes: int, run_s: float, compare_s: float, runs: int = 2) -> None:
        """Note how long a recipe takes, how often a step runs it, and what comparing takes; the last time counts."""
        derive_s = runs * run_s + compare_s
        if self.leaves:
            self._derive_s[place, nbytes] = derive_s
            if len(self._derive_s) > _MOST_PLACES:
                del self._derive_s[next(iter(self._derive_s))]
        self._noted_s += derive_s
        self._noted_bytes += nbytes

    def end_step(self, transfer_s_per_byte: float) -> None:
        """End a step in which a byte that went out and came back cost this much; 0 if nothing moved."""
        self.steps += 1
        self.derive_s, self.derived_bytes = self._noted_s, self._noted_bytes
        self._noted_s, self._noted_bytes = 0.0, 0
        if self.settled and transfer_s_per_byte:
            known = self._transfer_s_per_byte
            self._transfer_s_per_byte = max(transfer_s_per_byte, 0.0 if known is None else known * _FORGET)
