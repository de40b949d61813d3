"""Models: Llamas of 1 to 405 billion parameters, observed on fake tensors with three layers and then made as deep.

Layers of a Llama are alike, so a step of two layers and one of three tell everything about one of 126: what the middle
layer saves repeats itself, and all other times and sizes grow by a fixed amount with each layer.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from tba._forecast.hardware import Device
from tba._forecast.observe import Observed, observe
from tba._plan.facts import Place, Saved

TOKENS, VOCABULARY = 4096, 128256
_GROWING = ("forward_s", "backward_s", "weight_bytes", "trained_bytes", "trained", "other_bytes", "flops")


@dataclass(frozen=True)
class Model:
    """Fields of a Llama's published config, and how many sequences a card takes at a time."""

    name: str
    width: int
    inner_width: int
    layers: int
    heads: int
    key_heads: int
    tied: bool = False
    sequences: int = 1

    def subject(self) -> tuple[nn.Module, Any]:
        """Make the model in bfloat16, and its batch."""
        import transformers

        config = transformers.LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=self.width,
            intermediate_size=self.inner_width,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            num_key_value_heads=self.key_heads,
            tie_word_embeddings=self.tied,
            max_position_embeddings=TOKENS,
            use_cache=False,
        )
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        tokens = torch.randint(0, VOCABULARY, (self.sequences, TOKENS))
        return model, {"input_ids": tokens, "labels": tokens}


# Llama 3.2 1B and 3B, Llama 3.1 8B, 70B and 405B.
_MODELS = (
    Model("1B", 2048, 8192, 16, 32, 8, tied=True),
    Model("3B", 3072, 8192, 28, 24, 8, tied=True),
    Model("8B", 4096, 14336, 32, 32, 8),
    Model("70B", 8192, 28672, 80, 64, 8),
    Model("405B", 16384, 53248, 126, 128, 8),
)
MODELS = {model.name: model for model in _MODELS}


def observed(model: Model, device: Device) -> Observed:
    """Observe a step of a model of at least three layers, without running more than three."""
    two, three = (observe(replace(model, layers=layers).subject, device) for layers in (2, 3))
    return repeated(two, three, model.layers)


def repeated(two: Observed, three: Observed, layers: int) -> Observed:
    """Tell from steps of two and of three alike layers what a step of so many observes.

    `plain_bytes` is left at that of three: where the peak of a step is may change with its depth.
    """
    more = layers - 3
    forward_s, backward_s = three.forward_s - two.forward_s, three.backward_s - two.backward_s

    def at_an_end(each: Saved, like: Saved) -> Saved:
        assert like.nbytes == each.nbytes
        block, number = each.place
        return replace(
            each,
            place=Place(layers - 1 if block == 2 else block, number),
            saved_s=each.saved_s + more * (each.saved_s - like.saved_s),
            wanted_s=each.wanted_s + more * (each.wanted_s - like.wanted_s),
        )

    def copied(each: Saved, copy: int) -> Saved:
        return replace(
            each,
            place=Place(1 + copy, each.place.number),
            saved_s=each.saved_s + copy * forward_s,
            wanted_s=each.wanted_s + (more - copy) * backward_s,
        )

    inside = [index for index, each in enumerate(three.saved) if each.place.block == 1]
    assert inside == list(range(inside[0], inside[-1] + 1))
    middle = three.saved[inside[0] : inside[-1] + 1]
    ends = [each for each in three.saved if each.place.block != 1]
    saved = [at_an_end(*pair) for pair in zip(ends, two.saved, strict=True)]
    saved[inside[0] : inside[0]] = [copied(each, copy) for copy in range(more + 1) for each in middle]
    first, alike, last = three.blocks
    blocks = [first, *(replace(alike, begin_s=alike.begin_s + copy * forward_s) for copy in range(more + 1))]
    blocks.append(replace(last, begin_s=last.begin_s + more * forward_s))
    grown = {name: getattr(three, name) + more * (getattr(three, name) - getattr(two, name)) for name in _GROWING}
    return replace(three, saved=tuple(saved), blocks=tuple(blocks), **grown)
