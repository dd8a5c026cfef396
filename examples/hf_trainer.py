"""Averages under Hugging Face's Trainer: a callback makes, updates and saves them; the Trainer evaluates with them in the model.

    torchrun --standalone --nproc-per-node 2 examples/hf_trainer.py --steps 400 --out out/hf_trainer

The same command goes on from the last checkpoint. In the end out/hf_trainer/model is the averaged model, for from_pretrained().
"""

from __future__ import annotations

import argparse
import gc
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import torch
import torch.distributed as dist
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint

import shardow


class Averages(TrainerCallback):
    """Of the Trainer's model, plain, under DDP or FSDP; on every rank. They are saved in its checkpoints."""

    def __init__(self, decay: float | shardow.Schedule) -> None:
        self.decay = decay

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any, optimizer: Any, **_: Any) -> None:
        self.ema = shardow.EMA(model, self.decay, group=dist.group.WORLD if dist.is_initialized() else None)
        if state.global_step:  # the Trainer has just loaded this checkpoint
            self.ema.load(f"{args.output_dir}/checkpoint-{state.global_step}/averages.safetensors")
        self.ema.attach(optimizer)

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.ema.save(f"{args.output_dir}/checkpoint-{state.global_step}/averages.safetensors")


class AveragedTrainer(Trainer):
    averages: Averages  # one of its callbacks

    def evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        with self.averages.ema.swapped():
            return super().evaluate(*args, **kwargs)


def windows() -> list[dict[str, torch.Tensor]]:
    """Python's language reference, byte by byte: what help("assert") and the like show."""
    text = torch.tensor(list("\n".join(topics[name] for name in sorted(topics)).encode()))
    return [{"input_ids": window, "labels": window} for window in text.unfold(0, 128, 128)]


def train(steps: int, out: Path, save_every: int = 100) -> dict[str, float]:
    """The Trainer's metrics, of the averages."""
    config = LlamaConfig(vocab_size=256, hidden_size=128, intermediate_size=384, num_hidden_layers=4, num_attention_heads=4)
    arguments = TrainingArguments(
        str(out), max_steps=steps, eval_strategy="steps", eval_steps=save_every, save_steps=save_every, save_total_limit=2,
        learning_rate=1e-3, lr_scheduler_type="constant", per_device_train_batch_size=16, use_cpu=not torch.cuda.is_available(),
        ddp_find_unused_parameters=False,
    )  # fmt: skip
    torch.manual_seed(0)
    trainer = AveragedTrainer(LlamaForCausalLM(config), arguments, train_dataset=windows()[64:], eval_dataset=windows()[:64])
    trainer.averages = Averages(shardow.schedules.debiased(0.99))
    trainer.add_callback(trainer.averages)
    trainer.train(resume_from_checkpoint=get_last_checkpoint(out) if out.exists() else None)
    trainer.averages.ema.export(out / "model")
    config.save_pretrained(out / "model") if trainer.is_world_process_zero() else None
    return trainer.evaluate()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--out", type=Path, default=Path("out/hf_trainer"))
    parser.add_argument("--save-every", type=int, default=100)
    print(train(**vars(parser.parse_args())))
    gc.collect()
    if dist.is_initialized():
        dist.destroy_process_group()
