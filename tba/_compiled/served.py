"""Served: the modules that an Offloader finds compiled whole, and the backend that compiles them within its context."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from threading import RLock

from torch import nn

from .._config import OffloadConfig
from .._plan.no_plan import NoPlan
from .._stats import Counters, OffloadStats
from .._torch.private import is_sharded
from . import inductor
from .backend import CompileBackend
from .graph_plan import as_reason

# A module that has at least this share of the model's parameters is the whole model: what it is inside of, what is
# inside of a wrapper, or all but a head. Others are blocks, whose saved tensors come back one block at a time.
_WHOLE_SHARE = 0.8


class Served:
    """Backend of one Offloader, made when the first whole module is called.

    Args:
        config: the settings.
        model: gives it, or None.
        lock, counters: of the Offloader's engine.
    """

    def __init__(
        self, config: OffloadConfig, model: Callable[[], nn.Module | None], lock: RLock, counters: Counters
    ) -> None:
        self._config, self._model, self._lock, self._counters = config, model, lock, counters
        # These settings have no effect inside of a graph.
        self._open = config.tier != "keep" and not (config.compress or config.blocks or config.policy != "budget")
        # Where free memory decides, most models fit: they keep their code, and the compiler its caches.
        self._waits = config.tier == "auto" and config.memory_budget is None
        self._whole: weakref.WeakKeyDictionary[nn.Module, bool] = weakref.WeakKeyDictionary()
        self._backend: CompileBackend | None = None

    def serves(self, module: nn.Module) -> bool:
        """Whether what a module saves is to move within its graph."""
        if not self._open:
            return False
        if module not in self._whole:
            self._whole[module] = self._is_whole(module) and not inductor.missing()
        return self._whole[module]

    def backend(self) -> CompileBackend | None:
        """The backend to compile served modules by; None as long as no step has needed it."""
        if self._backend is None and not (self._waits and not self._counters.offloaded_bytes):
            self._backend = CompileBackend(self._config, engine=(self._lock, self._counters))
        return self._backend

    def _is_whole(self, module: nn.Module) -> bool:
        """Whether a module is the model, on a CPU and with all its weights on this rank: others have not been tried."""
        model = self._model()
        own = {} if model is None else {id(parameter): parameter for parameter in model.parameters()}
        found = sum(id(parameter) in own for parameter in module.parameters())
        if model is None or not own or found < _WHOLE_SHARE * len(own):
            return False
        return not (is_sharded(model) or is_sharded(module)) and all(each.is_cpu for each in own.values())

    @property
    def plan(self) -> NoPlan | None:
        """What stands for the plan of the hooks where graphs have plans of their own; None where they have none."""
        plans = () if self._backend is None else self._backend.plans
        return NoPlan(as_reason(plans)) if plans else None

    def added_to(self, stats: OffloadStats) -> OffloadStats:
        """Add to the engine's statistics what graphs hold beside it."""
        return stats if self._backend is None else self._backend.added_to(stats)

    def close(self) -> None:
        """Compile nothing any more, and end what moves."""
        self._open = False
        if self._backend is not None:
            self._backend.close()
