"""The fine-tuning arm: BERT-base in fp32, plain under AdamW, or converted to compact layers under CompActAdamW."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from .._workload.tools import make_state
from .train import Options, TrainArm

# The paper's fine-tuning (CompAct, arXiv 2410.15352, section 4.2), for its rank of 8.
_REFRESH, _ALPHA, _RATE = 500, 2.0, 2e-5


@dataclass(frozen=True, kw_only=True)
class BertOptions(Options):
    """Options of the arm that fine-tunes BERT.

    Attributes:
        rank: of the projections; None fine-tunes plainly.
        model: fields of `BertConfig` that differ from its defaults.
    """

    rank: int | None = None
    model: Mapping[str, Any] = field(default_factory=dict)


class _Classifier(nn.Module):
    """BERT with two classes: tokens [B, S] and labels [B], int64 -> loss, a scalar."""

    def __init__(self, fields: Mapping[str, Any]) -> None:
        super().__init__()
        from transformers import BertConfig, BertForSequenceClassification

        config: Any = BertConfig(**fields)
        config.num_labels = 2
        self.bert = BertForSequenceClassification(config).train()

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        loss: Tensor = self.bert(input_ids=tokens, attention_mask=torch.ones_like(tokens), labels=labels).loss
        return loss


class BertArm(TrainArm):
    """A `TrainArm` of BERT. Options: the fields of `BertOptions`."""

    options_class = BertOptions

    def make_model(self) -> Any:
        return _Classifier(self.options.model)

    def make_optimizer(self) -> torch.optim.Optimizer:
        self.converted: list[str] = []
        if self.options.rank is None:
            parameters = list(self.model.parameters())
            return make_state(torch.optim.AdamW(parameters, lr=0.0), parameters, _RATE)
        from compact import CompActAdamW, convert

        self.converted = convert(self.model, rank=self.options.rank, refresh=_REFRESH, alpha=_ALPHA)
        optimizer = CompActAdamW(self.model.parameters(), lr=0.0)
        compact_weights = {f"{name}.weight" for name in self.converted}
        # The state of compact weights is small: the first step makes it.
        plain = [weight for name, weight in self.model.named_parameters() if name not in compact_weights]
        return make_state(optimizer, plain, _RATE)

    def make_batch(self, index: int) -> tuple[Tensor, ...]:
        """Draw random tokens and labels: neither memory nor time depends on them."""
        generator, shape = torch.Generator().manual_seed(index), (self.options.batch, self.options.sequence)
        vocabulary = self.model.bert.config.vocab_size
        tokens = torch.randint(vocabulary, shape, generator=generator)
        return tokens, torch.randint(2, shape[:1], generator=generator)

    def describe(self) -> dict[str, Any]:
        return {"converted": len(self.converted)}
