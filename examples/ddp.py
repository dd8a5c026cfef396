"""Averages under DDP: a small network learns handwritten digits, and every rank keeps a part of the averages.

    torchrun --standalone --nproc-per-node 2 examples/ddp.py --steps 600 --out out/ddp

Stop it whenever you like: the same command goes on from its last checkpoint. In the end out/ddp/model is the averaged
model, for inference.
"""

from __future__ import annotations

import argparse
import gc
from pathlib import Path

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn

import shardow

DEVICE = torch.device("cuda", dist.get_node_local_rank()) if torch.cuda.is_available() else torch.device("cpu")


def train(steps: int, out: Path) -> dict[str, float]:
    """The share of held-out digits that is named rightly, by the weights and by their averages."""
    digits = load_digits()
    images = torch.tensor(digits.images / 8 - 1).float()[:, None].to(DEVICE)
    labels = torch.tensor(digits.target).to(DEVICE)
    torch.manual_seed(0)
    convolutions = [nn.Conv2d(1, 32, 3, padding=1), nn.GELU(), nn.Conv2d(32, 64, 3, stride=2), nn.GELU()]
    layers = [*convolutions, nn.Flatten(), nn.Linear(576, 10)]
    model = nn.parallel.DistributedDataParallel(nn.Sequential(*layers).to(DEVICE))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    ema = shardow.EMA(model, decay=shardow.schedules.warmup(0.999))
    for step in range(load(model, optimizer, ema, out) + 1, steps + 1):
        generator = torch.Generator().manual_seed(1_000_003 * step + dist.get_rank())  # a resume draws the same batches
        batch = torch.randint(300, len(images), (64,), generator=generator)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(images[batch]), labels[batch]).backward()
        optimizer.step()
        ema.update()
        if step % 100 == 0 or step == steps:
            folder = out / f"step-{step:06}"
            ema.save(folder / "averages.safetensors")
            if dist.get_rank() == 0:
                state = {"step": step, "model": model.state_dict(), "optimizer": optimizer.state_dict()}
                torch.save(state, out / "train.tmp")
                (out / "train.tmp").replace(folder / "train.pt")  # last: a directory that has it is whole
    found = {"weights": accuracy(model, images[:300], labels[:300])}
    with ema.swapped():  # on every rank
        found["averages"] = accuracy(model, images[:300], labels[:300])
    ema.export(out / "model")
    return found


@torch.no_grad()
def accuracy(model: nn.Module, images: torch.Tensor, labels: torch.Tensor) -> float:
    return float((model(images).argmax(1) == labels).float().mean())


def load(model: nn.Module, optimizer: torch.optim.Optimizer, ema: shardow.EMA, out: Path) -> int:
    """The step of the last whole checkpoint; 0 where there is none."""
    if not (whole := sorted(out.glob("step-*/train.pt"))):
        return 0
    found = torch.load(whole[-1], map_location=DEVICE)
    model.load_state_dict(found["model"])
    optimizer.load_state_dict(found["optimizer"])
    ema.load(whole[-1].with_name("averages.safetensors"))
    return int(found["step"])


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--out", type=Path, default=Path("out/ddp"))
    dist.init_process_group()
    print(f"rank {dist.get_rank()}: {train(**vars(parser.parse_args()))}")
    gc.collect()  # a model that is alive when the interpreter ends can abort it
    dist.destroy_process_group()
