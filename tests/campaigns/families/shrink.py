"""Shrink: a configuration of a few layers and a narrow width for any architecture that transformers has."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from typing import Any

from transformers import PreTrainedConfig

LAYERS, WIDTH, HEADS, HEAD, VOCAB, EXPERTS = 4, 48, 4, 12, 128, 4

# What a field's name means, first match first; the value is what the field gets where it holds a number.
_NUMBERS: tuple[tuple[str, int], ...] = (
    (r"(.*_)?vocab_size(_.*)?", VOCAB),
    (r"(num_|n_)?(.*_)?(num_)?(hidden_layers|layers|layer|blocks|depth)", LAYERS),
    (r"(.*_)?num_(key_value|kv)_heads|n_kv_heads?|num_global_key_value_heads|n_head_kv", 2),
    (r"(.*_)?(num_attention_heads|num_heads|n_heads?|attention_heads|num_(query|key|value)_heads)", HEADS),
    (r"(num_|n_)(.*_)?experts|moe_num_experts", EXPERTS),
    (r"(num_experts_per_tok|num_experts_per_token|moe_topk|moe_top_k|num_selected_experts|moe_k|top_k_experts)", 2),
    (r"n_group|topk_group|num_expert_group|expert_group_count", 1),
    (r"q_lora_rank|kv_lora_rank|o_lora_rank|index_head_dim", HEAD),
    (r"qk_rope_head_dim|qk_nope_head_dim|rotary_dim", HEAD // 2),
    (r"(.*_)?(head_dim|d_kv|kv_channels|v_head_dim|head_size|attention_head_dim)", HEAD),
    (
        r"(.*_)?(intermediate_size|ffn_dim|d_ff|d_inner|n_inner|ffn_hidden_size|filter_size|mlp_dim|d_mlp|"
        r"moe_dim|inner_dim|ffn_size)(_mlp)?",
        2 * WIDTH,
    ),
    (
        r"(.*_)?(hidden_size|d_model|n_embd|embed_dim|embedding_size|emb_dim|word_embed_proj_dim|hidden_dim|"
        r"dim_model|lru_width|projection_dim|embedding_dim|hidden_channels|out_hidden_size|n_embed)",
        WIDTH,
    ),
    (r"dim|encoder_dim|decoder_dim|width|hidden_sizes|embed_dims", WIDTH),
    (r"depths", 2),
    (r"(mamba_)?(d_state|state_size)|ssm_state_size", 8),
    (r"(mamba_)?chunk_size", 4),
    (
        r"(.*_)?(max_position_embeddings|n_positions|n_ctx|max_target_positions|max_source_positions|max_seq_len|max_sequence_length|"
        r"max_seqlen|max_length|context_length)",
        64,
    ),
    (r"image_size|img_size|input_size|crop_size", 32),
    (r"patch_size", 8),
    (r"(sliding_window|window_size|attention_window|local_window)(_size)?", 8),
)
_NUMBERS_COMPILED = tuple((re.compile(pattern), value) for pattern, value in _NUMBERS)
_TOKEN = re.compile(r".*(token_id|token_index|_id|_index)")


def small_config(kind: type[PreTrainedConfig], special: Mapping[str, Any] | None = None) -> PreTrainedConfig:
    """A small configuration of a class, its parts shrunk likewise; `special` goes over all, by dotted names."""
    return kind(**_small_values(kind, special or {}))


def _small_values(kind: type[PreTrainedConfig], special: Mapping[str, Any]) -> dict[str, Any]:
    mine = {name: value for name, value in special.items() if "." not in name}
    values: dict[str, Any] = {}
    try:
        usual: Any = kind()
    except Exception:  # it has no configuration of its own
        usual = None
    parts = getattr(kind, "sub_configs", {})
    for field in dataclasses.fields(kind):
        if field.name in parts or not field.init:
            continue
        default = field.default
        if field.default_factory is not dataclasses.MISSING:
            default = field.default_factory()
        small = _small(field.name, default, _value(usual, field.name, default))
        if small is not None:
            values[field.name] = small
    for name, part in parts.items():
        if isinstance(_value(usual, name, None), PreTrainedConfig):
            part = type(getattr(usual, name))
        if name not in mine and part.__name__ != "AutoConfig":
            inner = {key.partition(".")[2]: each for key, each in special.items() if key.startswith(name + ".")}
            values[name] = part(**_small_values(part, inner))
    return values | mine


def _value(config: Any, name: str, other: Any) -> Any:
    try:
        return getattr(config, name, other)
    except Exception:  # what differs from layer to layer is asked of each layer's part
        return other


def _small(name: str, default: Any, usual: Any) -> Any:
    """The small value of a field, or None to leave it."""
    if isinstance(usual, list) and len(usual) > LAYERS and name.endswith(("layer_types", "layers_block_type")):
        kinds = list(dict.fromkeys(usual))
        return [kinds[number % len(kinds)] for number in range(LAYERS)]
    numbers = default if isinstance(default, (list, tuple)) else [default]
    if not numbers or any(type(each) is not int for each in numbers):
        return None
    value = next((value for pattern, value in _NUMBERS_COMPILED if pattern.fullmatch(name)), None)
    if value is not None:
        if isinstance(default, (list, tuple)):
            # Stages of a pyramid; 2 heads divide every width.
            return type(default)(min(2 if "head" in name else value, each) for each in default)
        return min(value, default)
    if type(default) is int and _TOKEN.fullmatch(name) and default >= VOCAB:
        return 3 + default % (VOCAB - 8)
    return None
