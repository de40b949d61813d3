"""The fidelity arm: trains a GPT that saves less, once per learning rate and seed, and validates it."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from .._processes.serve import Tell
from .._workload.gpt import GPT
from .._workload.sizes import Model
from .._workload.text import Text, split_library
from .stored_bytes import stored_bytes, unique_bytes

# AdamW and CompActAdamW alike: warm-up over the first twentieth of the steps, then half a cosine to a tenth.
_BETAS, _WARM_UP, _LAST = (0.9, 0.95), 0.05, 0.1
# CompAct's refresh (arXiv 2410.15352, section 4.1). Its alpha of 0.25 goes with its learning rate of 0.01; with 1 a
# step is as long as Adam's, so that the grid of rates is as wide for these arms as for the others.
_REFRESH, _ALPHA = 50, 1.0
# Layers that stay plain, as in the paper: the attention's output projection and the head.
_SKIP = ("*.projection", "head")


@dataclass(frozen=True, kw_only=True)
class FidelityOptions(Model):
    """One training run of a model, with what it compresses among its `settings`.

    Attributes:
        steps: training steps.
        learning_rate: the highest rate of the schedule.
        seed: seed of the weights, the order of the data, and projections.
        convert_rank: rank of converted linear layers, as a share of the width, trained by `CompActAdamW`; or None.
        validation_batches: number of batches of the held-out text.
    """

    steps: int
    learning_rate: float = 0.0
    seed: int = 0
    convert_rank: float | None = None
    validation_batches: int = 32


def train_arm(options: Mapping[str, Any], tell: Tell) -> dict[str, Any]:
    """Train one arm: the first seed at every rate, the others at the rate that was best for it.

    Options: `rates` and `seeds`, `run` (fields of `FidelityOptions`).

    Returns:
        `runs` as `train` answers, the `best_rate`, and the bytes of a step: `stored_bytes` of this arm and
        `plain_bytes` of autograd's own.
    """
    torch.set_num_threads(1)
    texts = split_library()
    base = FidelityOptions(**options["run"])
    rates, (first, *others) = options["rates"], options["seeds"]

    def run(rate: float, seed: int) -> dict[str, Any]:
        found = train(replace(base, learning_rate=rate, seed=seed), texts)
        tell(f"lr {rate:g}, seed {seed}: {found['validation_loss']:.4f} nats in {found['wall_s']:.0f} s")
        return found

    runs = [run(rate, first) for rate in rates]
    best = best_rate(runs)
    runs += [run(best, seed) for seed in others]
    return {"runs": runs, "best_rate": best, **_bytes(base, texts[0])}


def best_rate(runs: Sequence[Mapping[str, Any]]) -> float:
    """Find the learning rate with the lowest validation loss."""
    rate: float = min(runs, key=lambda run: run["validation_loss"])["learning_rate"]
    return rate


def train(options: FidelityOptions, texts: tuple[Text, Text]) -> dict[str, Any]:
    """Train once. Returns `validation_loss` (infinite where it is no number) and `losses` of some twenty steps."""
    begun_s = time.perf_counter()
    model, optimizer = _make(options)
    losses = []
    with _context(model, options):
        for step in range(options.steps):
            for group in optimizer.param_groups:
                group["lr"] = scheduled_rate(options.learning_rate, step, options.steps)
            tokens, targets = _batch(texts[0], options, step)
            optimizer.zero_grad()
            loss: Tensor = model(tokens, targets)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    validation = validate(model, texts[1], options)
    return {
        "learning_rate": options.learning_rate,
        "seed": options.seed,
        "validation_loss": validation if math.isfinite(validation) else math.inf,
        "losses": losses[:: max(1, len(losses) // 20)],
        "wall_s": time.perf_counter() - begun_s,
    }


@torch.no_grad()
def validate(model: nn.Module, text: Text, options: FidelityOptions) -> float:
    """Compute the mean loss over the validation batches, in nats per byte. They are the same for all arms and seeds."""
    same = replace(options, seed=0)
    losses = [model(*_batch(text, same, index)).item() for index in range(options.validation_batches)]
    return math.fsum(losses) / len(losses)


def scheduled_rate(highest: float, step: int, steps: int) -> float:
    """Learning rate of a step: a straight rise, then half a cosine down to a tenth."""
    warm = max(1, round(_WARM_UP * steps))
    if step < warm:
        return highest * (step + 1) / warm
    way = (step - warm) / max(1, steps - warm)
    return highest * (_LAST + (1 - _LAST) * (1 + math.cos(math.pi * way)) / 2)


def _make(options: FidelityOptions) -> tuple[GPT, torch.optim.Optimizer]:
    from compact import CompActAdamW, convert

    torch.manual_seed(options.seed)
    model = GPT(options)
    if options.convert_rank is None:
        return model, torch.optim.AdamW(model.parameters(), betas=_BETAS, weight_decay=0.0)
    convert(model, rank=options.convert_rank, refresh=_REFRESH, alpha=_ALPHA, skip=_SKIP, seed=options.seed)
    return model, CompActAdamW(model.parameters(), betas=_BETAS, weight_decay=0.0)


@contextmanager
def _context(model: GPT, options: FidelityOptions) -> Iterator[None]:
    """Compress saved tensors of any size; nothing leaves memory."""
    if not options.settings:
        yield
        return
    from tba import offload_context

    with closing(offload_context(model, tier="keep", min_tensor_bytes=0, **options.settings)) as offload, offload:
        yield


def _bytes(options: FidelityOptions, text: Text) -> dict[str, int]:
    tokens, targets = _batch(text, options, 0)
    plain, _ = _make(replace(options, convert_rank=None))
    model, _ = _make(options)

    def backward(loss: Tensor) -> None:
        loss.backward()

    return {
        "plain_bytes": unique_bytes(plain, lambda: plain(tokens, targets)),
        "stored_bytes": stored_bytes(model, lambda: model(tokens, targets), backward, options.settings),
    }


def _batch(text: Text, options: FidelityOptions, index: int) -> tuple[Tensor, Tensor]:
    return text.batch(size=options.batch, sequence=options.sequence, seed=options.seed, index=index)
