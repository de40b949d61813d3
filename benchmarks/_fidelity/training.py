"""Training: one run of a task under one arm, and its validation."""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional

from .._workload.gpt import GPT, GPTConfig
from .._workload.sizes import Model
from .._workload.text import split_library
from .digits import CLASSES, split_digits
from .places import PlacedHooks

# AdamW and CompActAdamW alike: warm-up over the first twentieth of the steps, then half a cosine to a tenth.
_BETAS, _WARM_UP, _LAST = (0.9, 0.95), 0.05, 0.1
# Layers that CompAct leaves plain, as in the paper: the attention's output projection and the head.
_SKIP = ("*.projection", "head")
_LOSSES = 20  # losses of training steps that a run tells


@dataclass(frozen=True, kw_only=True)
class FidelityOptions(Model):
    """One training run: a model and its task, and how it saves less. `settings` are those of tba's presets.

    Attributes:
        task: a key of `TASKS`.
        steps: training steps.
        learning_rate: the highest rate of the schedule.
        seed: seed of the weights, the order of the data, projections and noise.
        convert: arguments of `compact.convert`, for `CompActAdamW`; or None.
        principal, adaptive: arguments of `PrincipalHooks` and `AdaptiveHooks`; or None.
        validation_batches: number of batches of what is held out.
        start: fields of the run whose weights this one begins with, all but those of the head; or None. Its sequence is
            no shorter.
    """

    task: str = "text"
    steps: int
    learning_rate: float = 0.0
    seed: int = 0
    convert: Mapping[str, Any] | None = None
    principal: Mapping[str, Any] | None = None
    adaptive: Mapping[str, Any] | None = None
    validation_batches: int = 128
    start: Mapping[str, Any] | None = None

    @property
    def trained_bytes(self) -> int:
        """Bytes of text that a run sees, repetitions counted."""
        return self.steps * self.batch * self.sequence

    def plain(self) -> FidelityOptions:
        """The same run, saving everything."""
        return replace(self, settings={}, convert=None, principal=None, adaptive=None)


class Data(Protocol):
    """A text, or images, to draw batches from."""

    @property
    def sha256(self) -> str: ...

    def batch(self, *, size: int, sequence: int, seed: int, index: int) -> tuple[Tensor, Tensor]: ...


class Classifier(GPT):
    """A GPT that reads a sequence and says its class: tokens [B, S] and classes [B] -> loss, or logits [B, classes]."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__(config)
        self.head = nn.Linear(config.width, CLASSES)

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Tensor:
        logits: Tensor = self.head(self.hidden(tokens).mean(1))
        return logits if targets is None else functional.cross_entropy(logits, targets)


@dataclass(frozen=True)
class Task:
    """What is learned.

    Attributes:
        describe: the task in words.
        read: gives the data to train on and the held-out data.
        make: makes the model, whose forward takes a batch of the data and returns the loss, or without targets logits.
    """

    describe: str
    read: Callable[[], tuple[Data, Data]]
    make: Callable[[FidelityOptions], nn.Module]


TASKS: Mapping[str, Task] = {
    "text": Task("the next byte of Python's standard library", split_library, GPT),
    "digits": Task("which digit was written, from its 8 x 8 pixels in their order", split_digits, Classifier),
}


def definition(options: FidelityOptions, data: tuple[Data, Data]) -> dict[str, Any]:
    """Everything that a run's outcome depends on, but for the code of this repository."""
    schedule = {"betas": _BETAS, "warm_up": _WARM_UP, "last": _LAST, "skip": _SKIP}
    texts = [each.sha256 for each in data]
    return {"run": asdict(options), "schedule": schedule, "texts": texts, "torch": torch.__version__}


def train(
    options: FidelityOptions, data: tuple[Data, Data], start: Path | None = None
) -> tuple[nn.Module, dict[str, Any]]:
    """Train once, from the weights in the file `start` if there is one.

    Returns:
        The model and its figures: `validation_loss` in nats (infinite where it is no number), `accuracy`, the `losses`
        of some twenty steps, `weights_sha256`, `wall_s`.
    """
    begun_s = time.perf_counter()
    model = make_model(options, start)
    optimizer = make_optimizer(model, options)
    hooks = make_hooks(model, options)
    losses = []
    with offloading(model, options):
        for step in range(options.steps):
            for group in optimizer.param_groups:
                group["lr"] = scheduled_rate(options.learning_rate, step, options.steps)
            batch = draw(data[0], options, step)
            with packing(hooks, step, model, batch):
                optimizer.zero_grad()
                loss: Tensor = model(*batch)
                loss.backward()
            optimizer.step()
            losses.append(loss.item())
    held_out, accuracy = validate(model, data[1], options)
    return model, {
        "learning_rate": options.learning_rate,
        "seed": options.seed,
        "validation_loss": held_out if math.isfinite(held_out) else math.inf,
        "accuracy": accuracy,
        "losses": losses[:: max(1, len(losses) // _LOSSES)],
        "weights_sha256": _hash(model),
        "wall_s": time.perf_counter() - begun_s,
    }


@torch.no_grad()
def validate(model: nn.Module, data: Data, options: FidelityOptions) -> tuple[float, float]:
    """Compute the mean loss in nats, and the share of right answers, over the held-out batches: the same for all."""
    same, losses, right = replace(options, seed=0), [], []
    for index in range(options.validation_batches):
        tokens, targets = draw(data, same, index)
        logits = model(tokens).flatten(0, -2)
        losses.append(functional.cross_entropy(logits, targets.flatten()).item())
        right.append((logits.argmax(1) == targets.flatten()).double().mean().item())
    return math.fsum(losses) / len(losses), math.fsum(right) / len(right)


def scheduled_rate(highest: float, step: int, steps: int) -> float:
    """Learning rate of a step: a straight rise, then half a cosine down to a tenth."""
    warm = max(1, round(_WARM_UP * steps))
    if step < warm:
        return highest * (step + 1) / warm
    way = (step - warm) / max(1, steps - warm)
    return highest * (_LAST + (1 - _LAST) * (1 + math.cos(math.pi * way)) / 2)


def make_model(options: FidelityOptions, start: Path | None = None) -> nn.Module:
    """Make the model of a run, converted if the arm is CompAct."""
    torch.manual_seed(options.seed)
    model = TASKS[options.task].make(options)
    if start is not None:
        weights = torch.load(start, weights_only=True)
        weights["positions.weight"] = weights["positions.weight"][: options.sequence]
        model.load_state_dict({name: w for name, w in weights.items() if not name.startswith("head.")}, strict=False)
    if options.convert is not None:
        from compact import convert

        convert(model, skip=_SKIP, seed=options.seed, **options.convert)
    return model


def make_optimizer(model: nn.Module, options: FidelityOptions) -> torch.optim.Optimizer:
    """Make AdamW, or that of CompAct."""
    if options.convert is None:
        return torch.optim.AdamW(model.parameters(), betas=_BETAS, weight_decay=0.0)
    from compact import CompActAdamW

    return CompActAdamW(model.parameters(), betas=_BETAS, weight_decay=0.0)


def make_hooks(model: nn.Module, options: FidelityOptions) -> PlacedHooks | None:
    """Make the hooks of an arm by a paper; None for all others."""
    if options.principal is not None:
        from .principal import PrincipalHooks

        return PrincipalHooks(model, seed=options.seed, **options.principal)
    if options.adaptive is not None:
        from .adaptive import AdaptiveHooks

        return AdaptiveHooks(model, seed=options.seed, **options.adaptive)
    return None


def packing(
    hooks: PlacedHooks | None, step: int, model: nn.Module, batch: tuple[Tensor, ...]
) -> AbstractContextManager[None]:
    """Give the context of a step under hooks; one that does nothing for None."""
    if hooks is None:
        return nullcontext()

    def run() -> None:
        model(*batch).backward()

    return hooks.step(step, run)


@contextmanager
def offloading(model: nn.Module, options: FidelityOptions) -> Iterator[None]:
    """Compress saved tensors of any size under the settings' preset; nothing leaves memory."""
    if not options.settings:
        yield
        return
    from tba import offload_context

    settings = {"min_tensor_bytes": 0, **options.settings}
    with closing(offload_context(model, tier="keep", **settings)) as offload, offload:
        yield


def draw(data: Data, options: FidelityOptions, index: int) -> tuple[Tensor, Tensor]:
    """Draw a batch of a run."""
    return data.batch(size=options.batch, sequence=options.sequence, seed=options.seed, index=index)


def _hash(model: nn.Module) -> str:
    digest = hashlib.sha256()
    for parameter in model.parameters():
        digest.update(parameter.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:16]
