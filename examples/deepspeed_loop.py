"""Averages of DeepSpeed's float32 masters, which ZeRO divides among ranks: a small network learns handwritten digits.

    torchrun --standalone --nproc-per-node 2 examples/deepspeed_loop.py --steps 300 --stage 2 --out out/deepspeed

`deepspeed` starts it as well; without a device, with DS_ACCELERATOR=cpu. The same command goes on from the last
checkpoint. In the end out/deepspeed/model is the averaged model, for inference.
"""

from __future__ import annotations

import argparse
import gc
from pathlib import Path

import deepspeed
import torch
from sklearn.datasets import load_digits
from torch import nn

from shardow.integrations.deepspeed import ema as averages_of


def train(steps: int, stage: int, out: Path, save_every: int = 100) -> dict[str, float]:
    """The share of held-out digits that is named rightly, by the weights and by their averages."""
    torch.manual_seed(0)
    convolutions = [nn.Conv2d(1, 32, 3, padding=1), nn.GELU(), nn.Conv2d(32, 64, 3, stride=2), nn.GELU()]
    network = nn.Sequential(*convolutions, nn.Flatten(), nn.Linear(576, 10))
    config = {
        "train_micro_batch_size_per_gpu": 64,
        "bf16": {"enabled": True},
        "gradient_clipping": 1.0,
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
        "steps_per_print": 10**9,
    }
    optimizer = torch.optim.AdamW(network.parameters(), lr=1e-3)
    engine, *_ = deepspeed.initialize(model=network, optimizer=optimizer, config=config)
    ema = averages_of(engine, decay=0.99)  # when the engine has its optimizer
    last, _ = engine.load_checkpoint(str(out)) if (out / "latest").exists() else (None, None)
    if last is not None:
        ema.load(Path(last).parent / "averages.safetensors")
    digits = load_digits()
    images = torch.tensor(digits.images / 8 - 1)[:, None].to(engine.device, torch.bfloat16)
    labels = torch.tensor(digits.target).to(engine.device)
    for step in range(engine.global_steps + 1, steps + 1):
        # a resume draws the same batches
        generator = torch.Generator().manual_seed(1_000_003 * step + engine.global_rank)
        batch = torch.randint(300, len(images), (64,), generator=generator)
        engine.backward(nn.functional.cross_entropy(engine(images[batch]).float(), labels[batch]))
        engine.step()
        ema.update()  # counts the steps that changed weights
        if step % save_every == 0 or step == steps:
            # first: DeepSpeed names its checkpoint as the latest at its end
            ema.save(out / f"step-{step:06}" / "averages.safetensors")
            engine.save_checkpoint(str(out), tag=f"step-{step:06}")
    engine.eval()
    found = {"weights": accuracy(engine, images[:300], labels[:300])}
    with ema.swapped():  # on every rank
        found["averages"] = accuracy(engine, images[:300], labels[:300])
    ema.export(out / "model")
    return found


@torch.no_grad()
def accuracy(model: nn.Module, images: torch.Tensor, labels: torch.Tensor) -> float:
    return float((model(images).argmax(1) == labels).float().mean())


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--stage", type=int, default=2, choices=(1, 2, 3))
    parser.add_argument("--out", type=Path, default=Path("out/deepspeed"))
    deepspeed.init_distributed()
    print(train(**vars(parser.parse_args())))
    gc.collect()  # a model that is alive when the interpreter ends can abort it
    torch.distributed.destroy_process_group()
