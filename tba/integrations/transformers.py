"""Transformers: a callback for `Trainer` and its subclasses, including TRL's trainers.

from tba.integrations.transformers import OffloadCallback

trainer = SFTTrainer(..., callbacks=[OffloadCallback(tier="nvme")])
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from typing import Any

from compact import Preset

from .. import ConfigError, Offloader, attach, offload_context
from ._figures import end, figures
from ._framework import checked, framework, of_accelerate, refuse

_library = framework("transformers", extra="hf")
_Callback: Any = _library.TrainerCallback

# A Trainer's methods that run the training after `on_train_begin`. Older releases only have the last.
_TRAINING = ("_run_epoch", "_finalize_training", "training_step")


class OffloadCallback(_Callback):  # type: ignore[misc]
    """Offloads during training: attaches when the first epoch begins, ends when training does, also by an exception.

    What was moved, how long training waited and the peak of memory go into the Trainer's logs as `tba/...`, and so to
    whatever it reports to.

    Args:
        tier: "nvme", "cpu", "keep" or "auto". Default: `TBA_TIER`, else "auto".
        memory_budget: memory that saved tensors may hold under tier "auto", such as "8GiB". Default: free memory less a
            margin.
        compress: a preset of `compact`. Default: none.
        settings: the other fields of `OffloadConfig`.

    Attributes:
        offload: the Offloader, once training has started.

    Raises:
        ConfigError: a setting is unknown or malformed. At the start of training: another offloader is on, or this model
            has one with other settings.
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
        self._trainer: Any = None
        self._model: Any = None
        self._guards: list[_Guard] = []

    def __getstate__(self) -> dict[str, Any]:
        """Copies and pickles keep the settings, and nothing of a training."""
        return vars(self) | {"offload": None, "_trainer": None, "_model": None, "_guards": []}

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Make the context. Attach later: if a callback after this one raises, nothing tells us."""
        self._end()
        trainer = _calling(_library.Trainer)
        refuse(_others(args, trainer))
        self._trainer = trainer
        self.offload = offload_context(trainer.model, **self._settings)
        handler = trainer.callback_handler
        parts = [(handler, "on_epoch_begin"), *((trainer, name) for name in _TRAINING if hasattr(trainer, name))]
        self._guards = [_Guard(owner, name, self._attach, self._end) for owner, name in parts]
        # Reporters read the logs in their own `on_log`, so ours must come first.
        handler.callbacks = [self, *(callback for callback in handler.callbacks if callback is not self)]

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Check that the model is still the one that was attached."""
        if self._model is not None and self._trainer.model is not self._model:
            raise ConfigError(
                f"trainer.model was replaced after OffloadCallback had attached to it (now a "
                f"{type(self._trainer.model).__name__}), so nothing would be offloaded; replace it before "
                "trainer.train(), or in model_init="
            )

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Make the engine judge the first step, which warns if it moved nothing."""
        if self.offload is not None and state.global_step == 1:
            self.offload.stats()

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **_: Any) -> None:
        """Add what was moved to the logs."""
        if self.offload is not None and not self.offload.closed and logs is not None:
            shown = figures(self.offload)
            logs.update(shown)
            if state.log_history:
                state.log_history[-1].update(shown)

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """End what `on_train_begin` began. `offload.stats()` still works."""
        self._end()

    def _attach(self) -> None:
        """Attach to the Trainer's model once; end if this callback was removed meanwhile."""
        if self not in self._trainer.callback_handler.callbacks:
            self._end()
        elif self._model is None:
            self.offload = attach(self._trainer.model, **self._settings)
            self._model = self._trainer.model

    def _end(self) -> None:
        guards, self._guards = self._guards, []
        for guard in reversed(guards):
            guard.remove()
        self._trainer = self._model = None
        if self.offload is not None:
            end(self.offload)


def _calling(kind: type[Any]) -> Any:
    """Find the caller that is an instance of a class: callbacks get the model, but not the Trainer."""
    frame = sys._getframe(1)
    while not isinstance(frame.f_locals.get("self"), kind):
        if frame.f_back is None:
            raise ConfigError(
                f"OffloadCallback.on_train_begin was not called by a {kind.__name__}; pass it in callbacks="
            )
        frame = frame.f_back
    return frame.f_locals["self"]


class _Guard:
    """Replaces one object's method: calls `begin` before it, and `end` if it raises.

    It does nothing once removed; guards that replaced it in turn may outlive it.
    """

    def __init__(self, owner: Any, name: str, begin: Callable[[], None], end: Callable[[], None]) -> None:
        self._owner, self._name = owner, name
        self._begin, self._end = begin, end
        self._before = vars(owner).get(name)  # what the object itself had, perhaps a guard
        self._method = getattr(owner, name)
        self._on = True
        functools.update_wrapper(self, self._method, updated=())
        setattr(owner, name, self)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not self._on:
            return self._method(*args, **kwargs)
        try:
            self._begin()
            return self._method(*args, **kwargs)
        except BaseException:
            self._end()
            raise

    def remove(self) -> None:
        """Put back what was there before, unless another has replaced this guard, which then passes calls through."""
        self._on = False
        there = vars(self._owner).get(self._name)
        while isinstance(there, _Guard) and not there._on:
            there = there._before
        if there is None:
            vars(self._owner).pop(self._name, None)
        else:
            setattr(self._owner, self._name, there)


def _others(args: Any, trainer: Any) -> Iterator[tuple[str, str]]:
    if getattr(args, "activation_offloading", False):
        yield "TRL's activation_offloading", f"activation_offloading=True from {type(args).__name__}(...)"
    for name in ("activation_checkpointing", "gradient_checkpointing"):
        given = getattr(args, f"{name}_kwargs", None)
        if getattr(args, name, False) and isinstance(given, dict) and given.get("offload"):
            yield "transformers' offload", f'"offload": True from {name}_kwargs in {type(args).__name__}(...)'
            break
    yield from of_accelerate(getattr(trainer.accelerator, "state", None), "it from the FSDP configuration")
