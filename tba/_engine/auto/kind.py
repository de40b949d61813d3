"""Kind: what is known of the steps in which the model is called alike."""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field

from torch import nn

from ..._blocks.watch import Places
from ..._plan.facts import Place
from ..._plan.plan import Plan
from .course import Entry


@dataclass
class Kind:
    """What is known of one kind of step.

    Attributes:
        modules: those whose forward is replaced while the model's next forward runs.
        blocks: whether those are its blocks, and not only what may be.
        block_bytes: the most that one of them saves.
        watched: a step of it has been seen.
        departures: steps that were not what the ones before it had been.
        visits: the module of each block, in order of forward.
        places: where it saves what, by its plan.
        course: what a step by its plan was, if one has been written down.
    """

    modules: list[weakref.ref[nn.Module]] = field(default_factory=list)
    blocks: bool = False
    block_bytes: int = 0
    watched: bool = False
    departures: int = 0
    visits: list[weakref.ref[nn.Module]] = field(default_factory=list)
    plan: Plan | None = None
    sends: dict[Place, int] = field(default_factory=dict)
    places: Places = field(default_factory=Places)
    course: list[Entry] | None = None
