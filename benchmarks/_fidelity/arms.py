"""Arms of the fidelity benchmark: one that trains at all rates and seeds, and one whose steps are measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .._arms.stored_bytes import stored_bytes, unique_bytes
from .._arms.train import Options, TrainArm
from .._processes.serve import Tell
from .._workload.tools import make_state
from .run_store import RunStore
from .training import (
    TASKS,
    Data,
    FidelityOptions,
    definition,
    draw,
    make_hooks,
    make_model,
    make_optimizer,
    packing,
    train,
)

# A training of next to no time.
_TINY = {"layers": 1, "width": 64, "heads": 2, "sequence": 64, "batch": 2, "steps": 2, "validation_batches": 1}
KEPT = "kept"  # what the note of a run begins with that was finished before


def train_arm(options: Mapping[str, Any], tell: Tell) -> dict[str, Any]:
    """Train one arm: the first seed at every rate, the others at the rate that was best for it.

    Options: `rates` and `seeds`, `run` (fields of `FidelityOptions`), `folder` of the runs that are finished: those are
    not trained again, and each further one is stored there at once.

    Returns:
        `runs` as `train` answers, the `best_rate`, and the bytes of a step: `stored_bytes` of this arm and
        `plain_bytes` of autograd's own.
    """
    torch.set_num_threads(1)
    base, store = FidelityOptions(**options["run"]), RunStore(Path(options["folder"]))
    data = TASKS[base.task].read()
    rates, (first, *others) = options["rates"], options["seeds"]

    def run(rate: float, seed: int) -> dict[str, Any]:
        which = replace(base, learning_rate=rate, seed=seed)
        found = store.get(definition(which, data))
        note = KEPT if found is not None else "trained"
        found = finish(which, data, store) if found is None else found
        tell(f"{note}: lr {rate:g}, seed {seed}: {found['validation_loss']:.4f} nats, {found['wall_s']:.0f} s")
        return found

    runs = [run(rate, first) for rate in rates]
    best = best_rate(runs)
    runs += [run(best, seed) for seed in others]
    return {"runs": runs, "best_rate": best, **_bytes(base, data)}


def finish(options: FidelityOptions, data: tuple[Data, Data], store: RunStore) -> dict[str, Any]:
    """Train once and store what came of it; first, where they are not there, make the weights that it begins with."""
    what, start = definition(options, data), None
    if options.start is not None:
        start = start_weights(FidelityOptions(**options.start), store)
    model, found = train(options, data, start)
    if options == options.plain() and options.start is None:
        store.put_weights(what, model.state_dict())
    store.put(what, found)
    return found


def start_weights(options: FidelityOptions, store: RunStore) -> Path:
    """Return the file of the weights that a plain run ends with, which is trained if it is not there."""
    data = TASKS[options.task].read()
    path = store.weights(definition(options, data))
    if not path.is_file():
        finish(options, data, store)
    return path


def best_rate(runs: Sequence[Mapping[str, Any]]) -> float:
    """Find the learning rate with the lowest validation loss."""
    rate: float = min(runs, key=lambda run: run["validation_loss"])["learning_rate"]
    return rate


def _bytes(options: FidelityOptions, data: tuple[Data, Data]) -> dict[str, int]:
    batch = draw(data[0], options, 0)
    plain, model = make_model(options.plain()), make_model(options)
    hooks = make_hooks(model, options)

    def backward(loss: Tensor) -> None:
        loss.backward()

    if hooks is not None:
        with packing(hooks, 0, model, batch):
            model(*batch)
        held = hooks.held_bytes
    elif options.settings:
        held = stored_bytes(model, lambda: model(*batch), backward, options.settings)
    else:
        held = unique_bytes(model, lambda: model(*batch))
    return {"plain_bytes": unique_bytes(plain, lambda: plain(*batch)), "stored_bytes": held}


@dataclass(frozen=True, kw_only=True)
class CostOptions(Options, FidelityOptions):
    """Options of the arm whose steps are measured."""


class CostArm(TrainArm):
    """A `TrainArm` of a task. What hooks learn now and then is not in a step's time, but in `moved`: seconds a step."""

    options_class = CostOptions

    def make_model(self) -> Any:
        data = TASKS[self.options.task].read()
        self._data, self._steps = data[0], 0
        # What libraries and codecs set up or compile once is idle memory, in every arm alike.
        train(replace(self.options, **_TINY), data)
        model = make_model(self.options)
        self._hooks = make_hooks(model, self.options)
        return model

    def make_optimizer(self) -> torch.optim.Optimizer:
        optimizer = make_optimizer(self.model, self.options)
        for group in optimizer.param_groups:
            group["lr"] = 0.0
        # The state of compact weights is small: the first step makes it.
        plain = [weight for weight in self.model.parameters() if not hasattr(weight, "subspace")]
        return make_state(optimizer, plain, self.options.learning_rate)

    def make_batch(self, index: int) -> tuple[Tensor, ...]:
        return draw(self._data, self.options, index)

    def step(self, *batch: Tensor) -> Tensor:
        with packing(self._hooks, self._steps, self.model, batch):
            self._steps += 1
            return super().step(*batch)

    def turn(self, index: int) -> dict[str, Any]:
        answer = super().turn(index)
        if self._hooks is not None:
            steps = self.options.steps
            answer["moved"]["learn_s"] = self._hooks.learn_s * sum(map(self._hooks.is_due, range(steps))) / steps
        return answer

    def describe(self) -> dict[str, Any]:
        return {}
