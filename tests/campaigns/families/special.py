"""Special: what the shrinker cannot guess of some architectures, by dotted names of configuration fields."""

from __future__ import annotations

from typing import Any

_MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 12, "mamba_d_state": 8, "mamba_chunk_size": 4}
_HYBRID = ["linear_attention", "full_attention"] * 2
_NEMOTRON = {"mamba_num_heads": 8, "mamba_head_dim": 16, "n_groups": 2, "ssm_state_size": 8, "chunk_size": 4}
_QWEN4 = {
    "indexer_n_heads": 2,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 16,
    "indexer_budget": 8,
    "indexer_compress_ratio": 2,
}
_CONVNEXT = {"hidden_sizes": [16, 16, 32, 32], "depths": [2, 2, 2, 2]}


def _sections(*sections: int) -> dict[str, Any]:
    """Rotary positions of time, height and width."""
    return {"text_config.rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [*sections]}}


SPECIAL: dict[str, dict[str, Any]] = {
    "axk2": {"num_key_value_heads": 4},
    "bailing_hybrid": {"layer_types": _HYBRID},
    "bamba": {**_MAMBA, "attn_layer_indices": [1, 3]},
    "blenderbot": {"encoder_layers": 4},
    "blt": {"encoder_hash_byte_group_vocab": 100},
    "cohere_compass_text": {"rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 10000.0}}},
    "deepseek_v2": {"num_experts_per_tok": 2, "num_key_value_heads": 4},
    "deepseek_v32": {"num_key_value_heads": 4},
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2},
    "dots3_note": {"num_key_value_heads": 4},
    "dots3_note_text": {"num_key_value_heads": 4},
    "gemma3n": {"text_config.num_kv_shared_layers": 2},
    "gemma3n_text": {
        "num_kv_shared_layers": 2,
        "intermediate_size": 128,
        "activation_sparsity_pattern": [0.5, 0.0, 0.0, 0.0],
    },
    "gemma4_assistant": {"text_config.hidden_size_per_layer_input": 0},
    "glm_moe_dsa": {"num_key_value_heads": 4},
    "falcon_h1": {**_MAMBA, "mamba_d_ssm": 96},
    "gpt_neo": {"attention_types": [[["global", "local"], 2]]},
    "granitemoehybrid": {**_MAMBA, "layer_types": _HYBRID},
    "hunyuan_v1_dense": {"head_dim": 12},
    "hunyuan_v1_moe": {"head_dim": 12},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "kimi_linear": {"layer_types": _HYBRID, "linear_num_heads": 4},
    "longcat_flash": {"head_dim": 6, "qk_head_dim": 12, "zero_expert_num": 2},
    "mamba2": {"num_heads": 8, "head_dim": 12, "n_groups": 2, "state_size": 8, "chunk_size": 4},
    "ministral": {"head_dim": 12},
    "nemotron": {"num_key_value_heads": 2},
    "nemotron_h": _NEMOTRON,
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2},
    "nemo_speechlm": {f"text_config.{name}": value for name, value in _NEMOTRON.items()},
    "perceiver": {"num_latents": 16, "d_latents": 64, "num_self_attends_per_block": 4, "max_position_embeddings": 64},
    "pop2piano": {"decoder_start_token_id": 0},
    "qwen4_exp": _QWEN4,
    "qwen4_exp_text": _QWEN4,
    "reformer": {"is_decoder": True, "hash_seed": 0, "axial_pos_shape": [4, 4], "axial_pos_embds_dim": [24, 24]},
    "xlstm": {"mode": "train", "chunk_size": 4},
    "zamba": {"attention_hidden_size": 96, "attention_head_dim": 24, "num_key_value_heads": 4},
    "zamba2": {"layers_block_type": ["linear_attention", "hybrid"] * 2, "mamba_d_state": 8},
    "xmod": {"default_language": "en_XX"},
    "esm": {"vocab_size": 128, "pad_token_id": 1, "mask_token_id": 4},
    "t5": {"decoder_start_token_id": 0},
    "mt5": {"decoder_start_token_id": 0},
    "umt5": {"decoder_start_token_id": 0},
    "longt5": {"decoder_start_token_id": 0},
    "masked/reformer": {"is_decoder": False, "axial_pos_shape": [4, 4]},
    "convnext": _CONVNEXT,
    "convnextv2": _CONVNEXT,
    **{
        name: _sections(2, 3, 3)
        for name in ("qwen2_vl", "qwen2_5_vl", "qwen2_5_omni_thinker", "glm4v", "glm46v", "glm_ocr")
    },
    "paddleocr_vl": _sections(2, 3, 3),
    "glm4v_moe": _sections(1, 1, 2),
    "mistral_large4": {"text_config.num_key_value_heads": 4},
    "hunyuan_vl": {"text_config.head_dim": 16},
    "udop": {"decoder_start_token_id": 0},
    "ernie4_5_vl_moe": {"text_config.moe_num_experts": 4},
    "granite_speech5_ctc": {"encoder_config.context_size": 16, "context_size": 16},
    "lasr_ctc": {"encoder_config.num_mel_bins": 80},
    "levit": {"image_size": 64},
    "stablelm": {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}},
    "switch_transformers": {"decoder_start_token_id": 0},
}
