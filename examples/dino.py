"""Self-distillation against an averaged teacher: a small vision transformer sorts handwritten digits without a label.

    torchrun --standalone --nproc-per-node 2 examples/dino.py --steps 300 --out out/dino

DINO (Caron et al., arXiv 2104.14294), centred as DINOv2 does: the student's answer to one view of an image follows the
teacher's to another one. Both are sharded by FSDP2, and the teacher's parameters are the averages of the student's:
there is no third set of them. Killed at any moment, the same command goes on from the last whole checkpoint, on any
number of ranks. In the end out/dino/model is the teacher, for inference.
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
from torch.nn import functional as F

import shardow

DEVICE = torch.device("cuda", dist.get_node_local_rank()) if torch.cuda.is_available() else torch.device("cpu")


class ViT(nn.Module):
    """Images (n, 1, 8, 8) to features (n, 64), and to their likeness to 64 prototypes (n, 64), in [-1, 1]."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(1, 64, 2, stride=2)
        self.places = nn.Embedding(16, 64)
        self.blocks = nn.Sequential(
            *[nn.TransformerEncoderLayer(64, 4, 128, dropout=0.0, batch_first=True, norm_first=True) for _ in range(2)]
        )
        self.norm = nn.LayerNorm(64)
        self.head = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 32))
        self.prototypes = nn.Linear(32, 64, bias=False)

    def forward(self, images: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        features = self.norm(self.blocks(self.patches(images).flatten(2).mT + self.places.weight)).mean(1)
        return features, F.linear(F.normalize(self.head(features)), F.normalize(self.prototypes.weight))


def sharded(trained: bool) -> ViT:
    with shardow.meta_init():
        model = ViT().requires_grad_(trained)
    for module in (*model.blocks, model):
        fully_shard(module)
    shardow.materialize(model, device=DEVICE, seed=0)
    return model


def view(images: torch.Tensor) -> torch.Tensor:
    """Turns, stretches and moves each image a little, and drops a tenth of its pixels."""
    maps = torch.eye(2, 3) + 0.3 * torch.rand(len(images), 2, 3) - 0.15
    grid = F.affine_grid(maps.to(DEVICE), list(images.shape), align_corners=False)
    moved = F.grid_sample(images, grid, padding_mode="border", align_corners=False)
    return torch.where(torch.rand(moved.shape).to(DEVICE) < 0.1, -1.0, moved)


def shares(likeness: torch.Tensor) -> torch.Tensor:
    """Shares each image among the prototypes, so that all of them get as much of the global batch (Sinkhorn-Knopp)."""
    shared = torch.exp(likeness / 0.02)
    for _ in range(3):
        totals = shared.sum(0)
        dist.all_reduce(totals)
        shared = F.normalize(shared / totals, p=1)
    return shared


@torch.no_grad()
def accuracy(model: nn.Module, images: torch.Tensor, labels: torch.Tensor) -> float:
    """The share of the first 300 digits that most of their ten nearest neighbours among the others are, too."""
    features = F.normalize(model(images)[0])
    nearest = (features[:300] @ features[300:].T).topk(10).indices
    return float((labels[300:][nearest].mode(1).values == labels[:300]).float().mean())


def train(steps: int, out: Path) -> dict[str, float]:
    """The teacher's accuracy before training and after it."""
    digits = load_digits()
    images, labels = (
        torch.tensor(digits.images / 8 - 1).float()[:, None].to(DEVICE),
        torch.tensor(digits.target).to(DEVICE),
    )
    student, teacher = sharded(True), sharded(False)
    ema = shardow.EMA(student, decay=0.95, averages=teacher)
    began = accuracy(teacher, images, labels)
    optimizer = torch.optim.AdamW(student.parameters(), lr=3e-3)
    checkpoints = shardow.Checkpoints(out, keep=3)
    if checkpoints.latest() is not None:
        checkpoints.restore(student, ema, optimizer, random=False)  # batches below are drawn by the step
    for step in range(ema.step + 1, steps + 1):
        torch.manual_seed(1_000_003 * step + dist.get_rank())  # a resume draws the same batches
        batch = images[torch.randint(300, len(images), (64,))]
        first, second = view(batch), view(batch)
        with torch.no_grad():
            wanted = shares(teacher(torch.cat([first, second]))[1])
        optimizer.zero_grad()
        F.cross_entropy(student(torch.cat([second, first]))[1] / 0.1, wanted).backward()
        optimizer.step()
        ema.update()
        if step % 50 == 0 or step == steps:
            checkpoints.save(step, student, ema, optimizer, asynchronous=step < steps)
    ema.export(out / "model")
    return {"before": began, "after": accuracy(teacher, images, labels)}


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--out", type=Path, default=Path("out/dino"))
    dist.init_process_group()
    print(f"rank {dist.get_rank()}: {train(**vars(parser.parse_args()))}")
    gc.collect()  # a sharded model that is alive when the interpreter ends can abort it
    dist.destroy_process_group()
