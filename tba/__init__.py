"""Offload the activations of PyTorch training and prefetch them for backward, bit for bit.

    from tba import offload_context

    with offload_context(model, tier="nvme") as offload:
        for batch in loader:
            model(**batch).loss.backward()
            optimizer.step(); optimizer.zero_grad()
    print(offload.stats())

`attach(model)` enters the context with the model's own forward, if a trainer owns the loop.
"""

from . import _armed, _config
from ._audit.audit import audit
from ._audit.report import Audit
from ._compiled.backend import CompileBackend, compile_backend
from ._config import OffloadConfig, Setting, describe
from ._context import attach, offload_context
from ._errors import (
    BudgetError,
    ClosedError,
    ConfigError,
    EditedError,
    OffloadError,
    OffloadWarning,
    StalledError,
    StorageError,
    TransferError,
)
from ._offloader import Offloader
from ._plan.no_plan import NoPlan
from ._plan.plan import Plan
from ._stats import OffloadStats, TraceEvent
from ._torch import private

__all__ = [
    "Audit",
    "BudgetError",
    "ClosedError",
    "CompileBackend",
    "ConfigError",
    "EditedError",
    "NoPlan",
    "OffloadConfig",
    "OffloadError",
    "OffloadStats",
    "OffloadWarning",
    "Offloader",
    "Plan",
    "Setting",
    "StalledError",
    "StorageError",
    "TraceEvent",
    "TransferError",
    "attach",
    "audit",
    "compile_backend",
    "describe",
    "offload_context",
]

__version__ = "0.1.0"

private.tell(_config.UNTESTED_TORCH)
_armed.end()
