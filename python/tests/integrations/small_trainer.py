"""A Trainer of a model that trains in no time, with a learning rate at which weights and averages are far apart."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from shardow.integrations.transformers import AveragedTrainer, EMACallback

#: Of accelerate; its full state dicts fail on CPUs.
FSDP: dict[str, Any] = {
    "fsdp": True,
    "fsdp_config": {
        "version": 2,
        "state_dict_type": "SHARDED_STATE_DICT",
        "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"],
    },
}


class Averaged(AveragedTrainer, Trainer):
    pass


def tiny(**more: Any) -> LlamaForCausalLM:
    sizes = {
        "vocab_size": 32,
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
    }
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**sizes, **more))


def sequences(count: int = 16) -> list[dict[str, torch.Tensor]]:
    ids = torch.randint(32, (count, 8), generator=torch.Generator().manual_seed(1))
    return [{"input_ids": one, "labels": one} for one in ids]


def trainer_of(
    out: Path, model: nn.Module | None = None, callbacks: Any = (), made: type = Averaged, **more: Any
) -> Any:
    """Training of 4 steps; a decay at which weights and averages are far apart."""
    arguments = {
        "max_steps": 4, "save_steps": 2, "per_device_train_batch_size": 2, "learning_rate": 1e-2,
        "lr_scheduler_type": "constant",
        "use_cpu": True, "disable_tqdm": True, "report_to": "none", "ddp_find_unused_parameters": False,
    }  # fmt: skip
    data = {name: more.pop(name) for name in ("eval_dataset", "processing_class", "compute_metrics") if name in more}
    return made(
        model or tiny(), TrainingArguments(str(out), **{**arguments, **more}), train_dataset=sequences(),
        **{"eval_dataset": sequences(4), **data}, callbacks=[*callbacks] or [EMACallback(0.9)],
    )  # fmt: skip


@torch.no_grad()
def loss_of(model: nn.Module) -> float:
    """Of what is held out."""
    held_out = torch.stack([one["input_ids"] for one in sequences(4)])
    return float(model.eval()(input_ids=held_out, labels=held_out).loss)
