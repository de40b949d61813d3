"""The fine-tuning arm: a few steps of BERT-base in fp32, and the peak of resident memory over what was there before."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from .._processes.resident_memory import peak_bytes, reset_peak, resident_bytes
from .._processes.serve import Tell
from .._workload.tools import make_optimizer

# Of the paper's fine-tuning (CompAct, arXiv 2410.15352, section 4.2), for its rank of 8.
_REFRESH, _ALPHA, _RATE = 500, 2.0, 2e-5


@dataclass(frozen=True, kw_only=True)
class BertOptions:
    """What one fine-tuning arm does.

    Attributes:
        batch, sequence: of the token ids; the labels are two classes.
        steps: measured, one after the other.
        rank: of the projections, under CompActAdamW; None fine-tunes plainly, under AdamW.
        tier: of `offload_context`; None trains without it.
        model: fields of `BertConfig` that are not its defaults.
        settings: fields of `OffloadConfig`.
        threads: of computing.
    """

    batch: int
    sequence: int
    steps: int
    rank: int | None = None
    tier: str | None = None
    model: Mapping[str, Any] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)
    threads: int = 2


def fine_tune(options: Mapping[str, Any], tell: Tell) -> dict[str, Any]:
    """Train, and answer with bytes and seconds.

    Idle is what is resident before the first step, with model and optimizer (AdamW's state included) built.

    Returns:
        `bare_bytes` before the model was built and `idle_bytes` after; per step `peak_bytes` over idle, `wall_s` and
        `losses`; `parameters`, `converted` (layers), and of the engine `written_bytes`.
    """
    o = BertOptions(**options)
    torch.set_num_threads(o.threads)
    _import()
    gc.collect()
    bare = resident_bytes()
    torch.manual_seed(0)
    model = _make_model(o)
    optimizer, converted = _make_optimizer(model, o)
    batches = [_make_batch(model, o, step) for step in range(o.steps)]
    gc.collect()
    idle = resident_bytes()
    answer: dict[str, Any] = {"peak_bytes": [], "wall_s": [], "losses": []}
    with _context(model, o) as stats:
        for step, batch in enumerate(batches):
            reset_peak()
            begun_s = time.perf_counter()
            optimizer.zero_grad()
            loss: Tensor = model(**batch).loss
            loss.backward()
            optimizer.step()
            answer["wall_s"].append(time.perf_counter() - begun_s)
            answer["peak_bytes"].append(peak_bytes() - idle)
            answer["losses"].append(loss.item())
            tell(f"step {step + 1}: {answer['peak_bytes'][-1] / 2**20:,.0f} MiB over idle")
        written = stats()
    return {
        **answer,
        "bare_bytes": bare,
        "idle_bytes": idle,
        "parameters": sum(p.numel() for p in model.parameters()),
        "converted": converted,
        "written_bytes": written,
    }


def _import() -> None:
    """Libraries count neither as model nor as step."""
    import transformers.models.bert.modeling_bert

    import compact
    import tba

    del transformers, compact, tba


def _make_model(options: BertOptions) -> nn.Module:
    from transformers import BertConfig, BertForSequenceClassification

    config: Any = BertConfig(**options.model)
    config.num_labels = 2
    model: nn.Module = BertForSequenceClassification(config).train()
    return model


def _make_optimizer(model: nn.Module, options: BertOptions) -> tuple[torch.optim.Optimizer, int]:
    """The optimizer, and how many layers are compact."""
    if options.rank is None:
        return make_optimizer(model, "adamw", _RATE), 0
    from compact import CompActAdamW, convert

    converted = convert(model, rank=options.rank, refresh=_REFRESH, alpha=_ALPHA)
    optimizer = CompActAdamW(model.parameters(), lr=0.0)
    compact_weights = {f"{name}.weight" for name in converted}
    for name, parameter in model.named_parameters():
        if name not in compact_weights:
            # As for the plain arm, one at a time. The state of compact weights is small, and is made in the first step.
            parameter.grad = torch.zeros_like(parameter)
            optimizer.step()
            parameter.grad = None
    for group in optimizer.param_groups:
        group["lr"] = _RATE
    return optimizer, len(converted)


def _make_batch(model: Any, options: BertOptions, step: int) -> dict[str, Tensor]:
    """Random tokens and labels: neither memory nor time depend on what they say."""
    generator = torch.Generator().manual_seed(step)
    shape = (options.batch, options.sequence)
    return {
        "input_ids": torch.randint(model.config.vocab_size, shape, generator=generator),
        "attention_mask": torch.ones(shape, dtype=torch.int64),
        "labels": torch.randint(2, shape[:1], generator=generator),
    }


@contextmanager
def _context(model: nn.Module, options: BertOptions) -> Iterator[Any]:
    """The offload context, if the arm has one; yields what says how many bytes were written."""
    if options.tier is None:
        yield lambda: 0
        return
    from tba import offload_context

    with closing(offload_context(model, options.tier, **options.settings)) as offload, offload:
        yield lambda: offload.stats().written_bytes
