"""Averages in a loop of your own with accelerate: a small network learns scikit-learn's handwritten digits.

    torchrun --standalone --nproc-per-node 2 examples/accelerate_loop.py --steps 300 --out out/accelerate

`accelerate launch` starts it as well, with whatever `accelerate config` says: DDP, FSDP2, mixed precision. The same
command goes on from the last whole state. In the end out/accelerate/model is the averaged model, for inference.
"""

from __future__ import annotations

import argparse
import gc
from pathlib import Path

import torch
from accelerate import Accelerator
from sklearn.datasets import load_digits
from torch import nn

from shardow.integrations.accelerate import average, last_state, save_averages, save_state


def train(steps: int, out: Path, save_every: int = 100) -> dict[str, float]:
    """The share of held-out digits that is named rightly, by the weights and by their averages."""
    accelerator = Accelerator()
    digits = load_digits()
    images, labels = torch.tensor(digits.images / 8 - 1).float(), torch.tensor(digits.target)
    images, labels = images[:, None].to(accelerator.device), labels.to(accelerator.device)
    torch.manual_seed(0)
    convolutions = [nn.Conv2d(1, 32, 3, padding=1), nn.GELU(), nn.Conv2d(32, 64, 3, stride=2), nn.GELU()]
    network = nn.Sequential(*convolutions, nn.Flatten(), nn.Linear(576, 10))
    model, optimizer = accelerator.prepare(network, torch.optim.AdamW(network.parameters(), lr=1e-3))
    ema = average(accelerator, model, optimizer, 0.99)
    if (state := last_state(out)) is not None:
        accelerator.load_state(state)
    for step in range(ema.step + 1, steps + 1):  # the averages know how far they are
        # a resume draws the same batches
        generator = torch.Generator().manual_seed(1_000_003 * step + accelerator.process_index)
        batch = torch.randint(300, len(images), (64,), generator=generator)
        loss = nn.functional.cross_entropy(model(images[batch]), labels[batch])
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        if step % save_every == 0 or step == steps:
            save_state(accelerator, out / f"step-{step:06}")
    found = {"weights": accuracy(model, images[:300], labels[:300])}
    with ema.swapped():  # on every rank
        found["averages"] = accuracy(model, images[:300], labels[:300])
    save_averages(accelerator, ema, model, out / "model")
    return found


@torch.no_grad()
def accuracy(model: nn.Module, images: torch.Tensor, labels: torch.Tensor) -> float:
    return float((model(images).argmax(1) == labels).float().mean())


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--out", type=Path, default=Path("out/accelerate"))
    print(train(**vars(parser.parse_args())))
    gc.collect()  # a model that is alive when the interpreter ends can abort it
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
