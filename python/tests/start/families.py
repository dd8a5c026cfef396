"""Tiny models of transformers whose save_pretrained() writes other names, or other tensors, than their modules have;
and some whose names are the same."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from torch import nn

TEXT: dict[str, Any] = {
    "vocab_size": 32, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "max_position_embeddings": 32, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
MOE: dict[str, Any] = {**TEXT, "moe_intermediate_size": 12, "num_experts_per_tok": 2}
VISION: dict[str, Any] = {
    "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 8,
    "patch_size": 4,
}  # fmt: skip
MLA: dict[str, Any] = {
    "q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 8,
    "num_key_value_heads": 2,
}  # fmt: skip
QWEN_VISION: dict[str, Any] = {
    "depth": 2, "embed_dim": 16, "hidden_size": 16, "num_heads": 2, "in_channels": 3, "patch_size": 4, "mlp_ratio": 2,
}  # fmt: skip
ROPE: dict[str, Any] = {"rope_parameters": {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 10000.0}}

#: What a class is called, and what its configuration is made of. The first seven differ in names or fusion.
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "Mixtral": ("MixtralForCausalLM", {**TEXT, "num_local_experts": 4}),
    "Qwen2Moe": ("Qwen2MoeForCausalLM", {**MOE, "num_experts": 4, "shared_expert_intermediate_size": 12}),
    "DeepseekV3": (
        "DeepseekV3ForCausalLM",
        {**MOE, **MLA, "n_routed_experts": 4, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1},
    ),
    "ViT": ("ViTForImageClassification", VISION),
    "Swin": (
        "SwinForImageClassification",
        {"image_size": 16, "patch_size": 2, "embed_dim": 8, "depths": [1, 2], "num_heads": [2, 2], "window_size": 2},
    ),
    "Llava": (
        "LlavaForConditionalGeneration",
        {
            "text_config": {"model_type": "llama", **TEXT}, "image_token_index": 31,
            "vision_config": {"model_type": "clip_vision_model", **VISION},
        },
    ),
    "Qwen2VL": (
        "Qwen2VLForConditionalGeneration",
        {"text_config": {**TEXT, **ROPE}, "vision_config": QWEN_VISION},
    ),
    "Qwen3Moe": ("Qwen3MoeForCausalLM", {**MOE, "num_experts": 4, "head_dim": 8}),
    "Olmoe": ("OlmoeForCausalLM", {**TEXT, "num_experts": 4, "num_experts_per_tok": 2}),
    "Beit": ("BeitForImageClassification", VISION),
    "DeiT": ("DeiTForImageClassification", VISION),
    "CLIPVision": ("CLIPVisionModel", VISION),
    "Llama": ("LlamaForCausalLM", {**TEXT, "tie_word_embeddings": True}),
    "GPT2": ("GPT2LMHeadModel", {"vocab_size": 32, "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 32}),
    "PaliGemma": (
        "PaliGemmaForConditionalGeneration",
        {
            "text_config": {"model_type": "gemma", **TEXT, "head_dim": 8},
            "vision_config": {"model_type": "siglip_vision_model", **VISION}, "projection_dim": 16,
        },
    ),
}  # fmt: skip


def build(family: str, seed: int = 0) -> nn.Module:
    name, options = FAMILIES[family]
    cls = getattr(transformers, name)
    torch.manual_seed(seed)
    model: nn.Module = cls(cls.config_class(**options))
    for tensor in model.state_dict().values():
        if tensor.is_floating_point():
            tensor.normal_()
    return model
