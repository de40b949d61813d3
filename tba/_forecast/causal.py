"""Causal: makes models of transformers attend without a mask if they would omit it after looking at its values.

Such a model checks whether its positions belong to several packed sequences, and passes no mask if they do not. Fake
tensors have no values, so it would pass one, and another kernel would save other tensors. A forecast uses batches of
whole sequences, so the answer is known.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Mapping
from typing import Any

from torch import nn

_NAME = "tba_causal"


def leave_masks_out(model: nn.Module, batch: Any) -> None:
    """Make the causal models of transformers within `model` attend by `is_causal`, unless the batch has a mask."""
    transformers: Any = sys.modules.get("transformers")
    if transformers is None or (isinstance(batch, Mapping) and batch.get("attention_mask") is not None):
        return
    for module in model.modules():
        if isinstance(module, transformers.PreTrainedModel) and _is_causal(module):
            sdpa = importlib.import_module("transformers.integrations.sdpa_attention")
            transformers.AttentionInterface.register(_NAME, sdpa.sdpa_attention_forward)
            module.set_attn_implementation(_NAME)


def _is_causal(module: Any) -> bool:
    """Whether all attention of a model is causal, over the whole sequence, and uses PyTorch's own function."""
    config = module.config
    if getattr(config, "_attn_implementation", None) != "sdpa" or getattr(config, "is_encoder_decoder", False):
        return False
    if getattr(config, "sliding_window", None) or set(getattr(config, "layer_types", None) or ()) - {"full_attention"}:
        return False
    causal = [each.is_causal for each in module.modules() if hasattr(each, "is_causal")]
    return bool(causal) and all(flag is True for flag in causal)
