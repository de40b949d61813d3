"""`tba.audit` tells what the engine keeps: shares within three points of those of a training step."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from torch import nn

from support.models import transformer
from tba import Audit, OffloadConfig, Offloader, audit

pytest.importorskip("transformers")

WIDTH, VOCAB, TOKENS = 64, 97, 48
POINTS = 0.03
PRESETS = ("exact", "safe8", "balanced", "max")


HEADS = {"llama": "LlamaForCausalLM", "gpt2": "GPT2LMHeadModel", "bert": "BertForMaskedLM"}


def model_of(family: str) -> nn.Module:
    torch.manual_seed(0)
    sizes = {"vocab": VOCAB, "width": WIDTH, "inner": 4 * WIDTH, "layers": 2, "heads": 4, "positions": 2 * TOKENS}
    model: nn.Module = transformer(HEADS[family], **sizes, pad_token_id=0)
    return model.train()


def batch() -> dict[str, torch.Tensor]:
    ids = torch.randint(3, VOCAB, (4, TOKENS), generator=torch.Generator().manual_seed(1))
    return {"input_ids": ids, "labels": ids}


@cache
def audited(family: str) -> Audit:
    return audit(model_of(family), batch(), presets=PRESETS)


def kept_by_the_engine(family: str, preset: str) -> tuple[float, Any]:
    """Share that a step keeps of what autograd saved, weights apart and each storage once."""
    model = model_of(family)
    config = OffloadConfig(tier="keep", compress=preset, min_tensor_bytes=0)
    offload = Offloader(model, config)
    try:
        torch.manual_seed(0)
        with offload:
            loss = model(**batch()).loss
        loss.backward()
        stats = offload.stats()
    finally:
        offload.close()
    unique = stats.saved_bytes - stats.weight_bytes - stats.duplicate_bytes
    return (unique - stats.derived_bytes - stats.encoded_bytes + stats.packed_bytes) / unique, stats


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("family", ["llama", "gpt2", "bert"])
def test_the_share_that_audit_tells_is_the_one_that_the_engine_keeps(family: str, preset: str) -> None:
    found = audited(family)
    told = sum(found.outcomes[preset].after_bytes.values()) / sum(found.before_bytes.values())
    kept, stats = kept_by_the_engine(family, preset)
    assert stats.derived_bytes > 0
    assert abs(told - kept) <= POINTS
    assert found.weight_bytes == stats.weight_bytes
