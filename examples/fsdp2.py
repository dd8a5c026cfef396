"""Averages under FSDP2: a small transformer that no rank ever holds whole learns scikit-learn's handwritten digits.

    torchrun --standalone --nproc-per-node 2 examples/fsdp2.py --steps 300 --out out/fsdp2

Killed at any moment, the same command goes on from the last whole checkpoint, on any number of ranks. In the end
out/fsdp2/model is the averaged model, for inference.
"""

from __future__ import annotations

import argparse
import gc
from pathlib import Path

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.distributed.fsdp import fully_shard

import shardow

DEVICE = torch.device("cuda", dist.get_node_local_rank()) if torch.cuda.is_available() else torch.device("cpu")


def train(steps: int, out: Path) -> dict[str, float]:
    """The share of held-out digits that is named rightly, by the weights and by each of their averages."""
    digits = load_digits()
    images, labels = torch.tensor(digits.images / 8 - 1).float().to(DEVICE), torch.tensor(digits.target).to(DEVICE)
    with shardow.meta_init():
        blocks = [
            nn.TransformerEncoderLayer(64, 4, 256, dropout=0.0, batch_first=True, norm_first=True) for _ in range(4)
        ]
        model = nn.Sequential(nn.Linear(8, 64), *blocks, nn.Flatten(), nn.LayerNorm(8 * 64), nn.Linear(8 * 64, 10))
    for module in (*blocks, model):
        fully_shard(module)
    shardow.materialize(model, device=DEVICE, seed=0)  # or from a file or directory: materialize(model, path)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    ema = shardow.EMA(model, decay=[0.99, 0.999])  # both in one pass over the weights
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, 1.0, total_iters=20)
    checkpoints = shardow.Checkpoints(out, keep=3)
    if checkpoints.latest() is not None:
        checkpoints.restore(model, ema, optimizer, scheduler, random=False)  # batches below are drawn by the step
    for step in range(ema.step + 1, steps + 1):
        torch.manual_seed(1_000_003 * step + dist.get_rank())  # a resume draws the same batches
        batch = torch.randint(300, len(images), (64,))
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(images[batch]), labels[batch]).backward()
        optimizer.step()
        scheduler.step()
        ema.update()
        if step % 100 == 0 or step == steps:  # training goes on while it is written; the next save waits for it
            checkpoints.save(step, model, ema, optimizer, scheduler, asynchronous=step < steps)
    ema.export(out / "model", decay=0.99)
    with torch.no_grad():
        named = {"weights": model(images[:300]).argmax(1)}
        for decay in ema.decays:
            with ema.swapped(decay):  # on every rank
                named[f"averages of decay {decay}"] = model(images[:300]).argmax(1)
    return {name: float((classes == labels[:300]).float().mean()) for name, classes in named.items()}


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--out", type=Path, default=Path("out/fsdp2"))
    dist.init_process_group()
    print(f"rank {dist.get_rank()}: {train(**vars(parser.parse_args()))}")
    gc.collect()  # a sharded model that is alive when the interpreter ends can abort it
    dist.destroy_process_group()
