"""Averages under FSDP2: a small transformer that no rank ever holds whole learns scikit-learn's handwritten digits.

    torchrun --standalone --nproc-per-node 2 examples/fsdp2.py --steps 300 --out out/fsdp2

The same command goes on from the last checkpoint, on any number of ranks. In the end out/fsdp2/model is the averaged model, for inference.
"""

from __future__ import annotations

import argparse
import gc
import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from sklearn.datasets import load_digits
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

import shardow

DEVICE = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if torch.cuda.is_available() else torch.device("cpu")


def train(steps: int, out: Path) -> dict[str, float]:
    """The share of held-out digits that is named rightly, by the weights and by each of their averages."""
    digits = load_digits()
    images, labels = torch.tensor(digits.images / 8 - 1).float().to(DEVICE), torch.tensor(digits.target).to(DEVICE)
    with shardow.meta_init():
        blocks = [nn.TransformerEncoderLayer(64, 4, 256, dropout=0.0, batch_first=True, norm_first=True) for _ in range(4)]
        model = nn.Sequential(nn.Linear(8, 64), *blocks, nn.Flatten(), nn.LayerNorm(8 * 64), nn.Linear(8 * 64, 10))
    for module in (*blocks, model):
        fully_shard(module)
    shardow.materialize(model, device=DEVICE, seed=0)  # or from a file or directory: materialize(model, path)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    ema = shardow.EMA(model, decay=[0.99, 0.999])  # both in one pass over the weights
    for step in range(load(model, optimizer, ema, out) + 1, steps + 1):
        generator = torch.Generator().manual_seed(1_000_003 * step + dist.get_rank())  # a resume draws the same batches
        batch = torch.randint(300, len(images), (64,), generator=generator)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(images[batch]), labels[batch]).backward()
        optimizer.step()
        ema.update()
        if step % 100 == 0 or step == steps:
            dcp.save(state(step, model, optimizer, ema), checkpoint_id=out / f"step-{step:06}")
    found = {"weights": accuracy(model, images[:300], labels[:300])}
    for decay in ema.decays:
        with ema.swapped(decay):  # on every rank
            found[f"averages of decay {decay}"] = accuracy(model, images[:300], labels[:300])
    ema.export(out / "model", decay=0.99)
    return found


@torch.no_grad()
def accuracy(model: nn.Module, images: torch.Tensor, labels: torch.Tensor) -> float:
    return float((model(images).argmax(1) == labels).float().mean())


def state(step: int, model: nn.Module, optimizer: torch.optim.Optimizer, ema: shardow.EMA) -> dict[str, Any]:
    weights, of_optimizer = get_state_dict(model, optimizer)
    return {"step": step, "model": weights, "optimizer": of_optimizer, "ema": ema}


def load(model: nn.Module, optimizer: torch.optim.Optimizer, ema: shardow.EMA, out: Path) -> int:
    """The step of the last whole checkpoint; 0 where there is none. torch writes .metadata last."""
    if not (whole := sorted(out.glob("step-*/.metadata"))):
        return 0
    found = state(0, model, optimizer, ema)
    dcp.load(found, checkpoint_id=whole[-1].parent)
    set_state_dict(model, optimizer, model_state_dict=found["model"], optim_state_dict=found["optimizer"])
    return int(found["step"])


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--out", type=Path, default=Path("out/fsdp2"))
    options = parser.parse_args()
    dist.init_process_group()
    results = train(**vars(options))
    if dist.get_rank() == 0:
        print(results)
    gc.collect()  # a sharded model that is alive when the interpreter ends can abort it
    dist.destroy_process_group()
