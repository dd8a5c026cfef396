"""Averages under Hugging Face's Trainer: the callback keeps and saves them; the Trainer evaluates with them in the
model.

    torchrun --standalone --nproc-per-node 2 examples/hf_trainer.py --steps 400 --out out/hf_trainer

The same command goes on from the last whole checkpoint. In the end out/hf_trainer/model is the averaged model, for
from_pretrained().
"""

from __future__ import annotations

import argparse
import gc
from pathlib import Path
from pydoc_data.topics import topics

import torch
import torch.distributed as dist
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from shardow import schedules
from shardow.integrations.transformers import AveragedTrainer, EMACallback, last_checkpoint


class Averaged(AveragedTrainer, Trainer):
    """Any trainer that is a Trainer goes here: Seq2SeqTrainer, TRL's SFTTrainer, your own."""


def windows() -> list[dict[str, torch.Tensor]]:
    """Python's language reference, byte by byte: what help("assert") and the like show."""
    text = torch.tensor(list("\n".join(topics[name] for name in sorted(topics)).encode()))
    return [{"input_ids": window, "labels": window} for window in text.unfold(0, 128, 128)]


def train(steps: int, out: Path, save_every: int = 100, **options: object) -> dict[str, float]:
    """The Trainer's metrics, of the averages. ``options``: more of TrainingArguments."""
    config = LlamaConfig(
        vocab_size=256, hidden_size=128, intermediate_size=384, num_hidden_layers=4, num_attention_heads=4
    )
    arguments = TrainingArguments(
        str(out), max_steps=steps, eval_strategy="steps", eval_steps=save_every, save_steps=save_every,
        save_total_limit=2,
        learning_rate=1e-3, lr_scheduler_type="constant", per_device_train_batch_size=16,
        use_cpu=not torch.cuda.is_available(),
        ddp_find_unused_parameters=False, **options,
    )  # fmt: skip
    torch.manual_seed(0)
    model = LlamaForCausalLM(config)
    data = {"train_dataset": windows()[64:], "eval_dataset": windows()[:64]}
    trainer = Averaged(model, arguments, callbacks=[EMACallback(schedules.debiased(0.99))], **data)
    trainer.train(resume_from_checkpoint=last_checkpoint(out))
    trainer.save_averages(out / "model")
    return trainer.evaluate()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--out", type=Path, default=Path("out/hf_trainer"))
    parser.add_argument("--save-every", type=int, default=100)
    print(train(**vars(parser.parse_args())))
    gc.collect()  # a model that is alive when the interpreter ends can abort it
    if dist.is_initialized():
        dist.destroy_process_group()
