"""Lightning: a callback for `lightning.Trainer`.

from tba.integrations.lightning import OffloadCallback

trainer = lightning.Trainer(..., callbacks=[OffloadCallback(tier="nvme")])
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from compact import Preset

from .. import Offloader, offload_context
from ._figures import end, figures
from ._framework import checked, framework, of_deepspeed, refuse

_Callback: Any = framework("lightning.pytorch", extra="lightning").Callback


class OffloadCallback(_Callback):  # type: ignore[misc]
    """Offloads what each training batch saves for backward; validation is left alone.

    The context is entered before `training_step` and left after the batch, also when training raises. What was moved is
    logged as `tba/...`.

    Args:
        tier: "nvme", "cpu", "keep" or "auto". Default: `TBA_TIER`, else "auto".
        memory_budget: memory that saved tensors may hold under tier "auto", such as "8GiB". Default: free memory less a
            margin.
        compress: a preset of `compact`. Default: none.
        settings: the other fields of `OffloadConfig`.

    Attributes:
        offload: the Offloader, once training has started. If a strategy spawns processes, theirs have it.

    Raises:
        ConfigError: a setting is unknown or malformed. At the start of training: another offloader is on.
    """

    def __init__(
        self,
        *,
        tier: str | None = None,
        memory_budget: int | str | None = None,
        compress: str | Preset | None = None,
        **settings: Any,
    ) -> None:
        settings = checked(settings, tier=tier, memory_budget=memory_budget, compress=compress)
        self.offload: Offloader | None = None
        self._settings = settings
        self._inside = False

    def __getstate__(self) -> dict[str, Any]:
        """Copies and pickles keep the settings, and nothing of a training."""
        return vars(self) | {"offload": None, "_inside": False}

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Make the context of this training."""
        refuse(_others(trainer))
        self.offload = offload_context(pl_module, **self._settings)

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """Enter the context."""
        self._leave()  # a batch that another callback skipped has no end
        if self.offload is not None:
            self.offload.__enter__()
            self._inside = True

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Leave the context, and log what was moved."""
        self._leave()
        if self.offload is not None:
            pl_module.log_dict(figures(self.offload), on_step=True, on_epoch=False, batch_size=1)

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Leave the context with the exception, and end."""
        self._leave(exception)
        self._end()

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """End. `offload.stats()` still works."""
        self._leave()
        self._end()

    def _leave(self, error: BaseException | None = None) -> None:
        inside, self._inside = self._inside, False
        if inside and self.offload is not None:
            self.offload.__exit__(type(error) if error is not None else None, error, None)

    def _end(self) -> None:
        if self.offload is not None:
            end(self.offload)


def _others(trainer: Any) -> Iterator[tuple[str, str]]:
    config = getattr(trainer.strategy, "config", None)
    if isinstance(config, dict):
        yield from of_deepspeed(config)
