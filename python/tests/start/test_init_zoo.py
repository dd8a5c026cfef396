"""meta_init() and materialize() beside usual construction, for layers and models of torch, transformers and timm: the
same parameters and buffers, or an error that names a tensor.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
from nets import same
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import shardow

EVERY = bool(os.environ.get("SHARDOW_ALL"))
Build = Callable[[], nn.Module]


class EachDrawAlike(TorchDispatchMode):
    """Every draw begins with one seed, so that the order of draws, which is another by modules, does not matter."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.Tag.nondeterministic_seeded in func.tags:
            torch.default_generator.manual_seed(5)
        return func(*args, **(kwargs or {}))


def tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    return dict([*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)])


def ties(model: nn.Module) -> dict[str, str]:
    """Returns each tensor's first name."""
    first: dict[int, str] = {}
    return {name: first.setdefault(id(tensor), name) for name, tensor in tensors(model).items()}


def compare(build: Build, refused: str | None = None) -> None:
    with EachDrawAlike():
        usual = build()
        with shardow.meta_init():
            model = build()
        if refused is not None:
            with pytest.raises(ValueError, match=refused):
                shardow.materialize(model)
            return
        shardow.materialize(model)
    same(tensors(model), tensors(usual))
    assert ties(model) == ties(usual)
    assert [p.requires_grad for p in model.parameters()] == [p.requires_grad for p in usual.parameters()]


class Ones(nn.Linear):
    """Replaces a parameter that reset_parameters() wrote."""

    def __init__(self, *sizes: int) -> None:
        super().__init__(*sizes)
        self.bias = nn.Parameter(torch.ones(sizes[1]))


LAYERS: dict[str, Build] = {
    "linear": lambda: nn.Linear(3, 4),
    "bilinear": lambda: nn.Bilinear(2, 3, 4),
    "convs": lambda: nn.Sequential(nn.Conv1d(3, 4, 2), nn.Conv2d(3, 4, 2, groups=1), nn.ConvTranspose3d(3, 4, 2)),
    "norms": lambda: nn.Sequential(
        nn.BatchNorm2d(3), nn.LayerNorm(4), nn.GroupNorm(2, 4), nn.RMSNorm(3), nn.InstanceNorm1d(3, affine=True)
    ),
    "embeddings": lambda: nn.ModuleList([nn.Embedding(5, 3, padding_idx=2), nn.EmbeddingBag(5, 3, padding_idx=1)]),
    "embedding of values": lambda: nn.Embedding.from_pretrained(torch.arange(6.0).view(2, 3)),
    "another bias": lambda: Ones(3, 4),
    "prelu": lambda: nn.PReLU(3),
    "recurrent": lambda: nn.ModuleList([nn.LSTM(3, 4, 2, bidirectional=True), nn.GRU(3, 4), nn.RNN(3, 4)]),
    "projected": lambda: nn.LSTM(3, 4, proj_size=2),
    "cells": lambda: nn.ModuleList([nn.LSTMCell(3, 4), nn.GRUCell(3, 4), nn.RNNCell(3, 4)]),
    "attention": lambda: nn.MultiheadAttention(4, 2, kdim=3, vdim=5, add_bias_kv=True),
    "encoder": lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(4, 2, 8, batch_first=True), 2),
    "decoder": lambda: nn.TransformerDecoder(nn.TransformerDecoderLayer(4, 2, 8), 2),
    "transformer": lambda: nn.Transformer(4, 2, 1, 1, 8, batch_first=True),
    "adaptive softmax": lambda: nn.AdaptiveLogSoftmaxWithLoss(4, 9, [3, 6]),
    "half": lambda: nn.Sequential(nn.LayerNorm(3), nn.Linear(2, 2, dtype=torch.bfloat16)),
    "frozen": lambda: nn.Linear(3, 4).requires_grad_(False),
    "parameters": lambda: nn.ParameterList([torch.ones(2), nn.Parameter(torch.randn(3))]),
    "parameter dict": lambda: nn.ParameterDict({"a": torch.zeros(2)}),
}


@pytest.mark.parametrize("name", LAYERS)
def test_layers_of_torch(name: str) -> None:
    compare(LAYERS[name])


@pytest.mark.parametrize("wrap", [nn.utils.parametrizations.weight_norm, nn.utils.parametrizations.spectral_norm])
def test_normalised_layers_of_torch(wrap: Callable[[nn.Module], nn.Module]) -> None:
    compare(lambda: wrap(nn.Linear(3, 4)), r"not kept: .*parametrizations\.weight")


SMALL = {
    "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 8,
    "intermediate_size": 24, "vocab_size": 40, "max_position_embeddings": 16, "n_embd": 16, "n_layer": 2, "n_head": 2,
    "d_model": 16, "num_layers": 2, "d_ff": 24, "num_heads": 2, "d_kv": 8, "encoder_layers": 2, "decoder_layers": 2,
    "encoder_attention_heads": 2, "decoder_attention_heads": 2, "encoder_ffn_dim": 24, "decoder_ffn_dim": 24,
    "image_size": 16, "patch_size": 8, "pad_token_id": 0, "num_local_experts": 2, "n_routed_experts": 4,
    "num_experts": 4, "moe_intermediate_size": 8, "n_group": 1, "topk_group": 1, "q_lora_rank": 8, "kv_lora_rank": 8,
    "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 8, "num_experts_per_tok": 2, "word_embed_proj_dim": 16,
    "ffn_dim": 24, "bos_token_id": 1, "eos_token_id": 2, "embed_dim": 8, "depths": [1, 1], "embedding_size": 16,
    "window_size": 2, "num_mel_bins": 8, "max_source_positions": 16, "max_target_positions": 16, "hidden_dim": 16,
}  # fmt: skip
REFUSED = {"mamba": r"not kept: 'layers.0.mixer.A_log'"}
FAMILIES = ["gpt2", "llama", "bert", "t5", "mixtral", "vit"]
MORE_FAMILIES = [
    "albert", "bart", "bloom", "clip_text_model", "deberta-v2", "deepseek_v3", "dinov2", "distilbert", "electra",
    "falcon", "gemma2", "gemma3_text", "gpt_neox", "gptj", "mamba", "mistral", "mpt", "olmo2", "opt", "phi3", "qwen2",
    "qwen2_moe", "qwen3", "roberta", "siglip_vision_model", "starcoder2", "whisper", "xglm",
]  # fmt: skip


@pytest.mark.parametrize("family", FAMILIES + MORE_FAMILIES * EVERY)
def test_models_of_transformers(family: str) -> None:
    transformers = pytest.importorskip("transformers")
    if family not in transformers.CONFIG_MAPPING:
        pytest.skip(f"this transformers has no {family}")
    known = transformers.CONFIG_MAPPING[family]().to_dict().keys()
    config = transformers.CONFIG_MAPPING[family](**{key: value for key, value in SMALL.items() if key in known})
    compare(lambda: transformers.AutoModel.from_config(config), REFUSED.get(family))


TIMM = ["vit_tiny_patch16_224", "resnet10t", "convnext_atto"]
MORE_TIMM = [
    "deit_tiny_patch16_224", "swin_tiny_patch4_window7_224", "efficientnet_b0", "mobilenetv3_small_050", "regnetx_002",
    "mixer_s32_224", "levit_128s", "cait_xxs24_224", "xcit_nano_12_p16_224", "eva02_tiny_patch14_224",
    "maxvit_rmlp_pico_rw_256",
]  # fmt: skip


@pytest.mark.parametrize("name", TIMM + MORE_TIMM * EVERY)
def test_models_of_timm(name: str) -> None:
    timm = pytest.importorskip("timm", exc_type=ImportError)
    if name.startswith("swin"):
        with pytest.raises(ValueError, match=r"layers\.0\.blocks\.1\.attn_mask"):
            compare(lambda: timm.create_model(name, num_classes=3))
        return
    compare(lambda: timm.create_model(name, num_classes=3))
