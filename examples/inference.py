"""Inference with averages: names handwritten digits with the model that examples/ddp.py exported, or saved at any of
its steps.

    python examples/inference.py out/ddp/model
    python examples/inference.py out/ddp/step-000600/averages.safetensors --dtype bfloat16
    torchrun --standalone --nproc-per-node 2 examples/inference.py out/ddp/model

An export is complete: weights that were averaged, all others, buffers. A training run's own file of averages has what
was averaged. On several ranks the model is sharded, and each rank reads its own bytes.
"""

from __future__ import annotations

import argparse
import gc
import os
from pathlib import Path

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.distributed.fsdp import fully_shard

import shardow

RANKS = int(os.environ.get("WORLD_SIZE", 1))
LOCAL_RANK = int(os.environ.get("LOCAL_RANK", 0))
DEVICE = torch.device("cuda", LOCAL_RANK) if torch.cuda.is_available() else torch.device("cpu")


def opened(path: Path, dtype: torch.dtype | None = None) -> nn.Module:
    """The averaged model, of which no rank ever holds more than its own shards."""
    with shardow.meta_init():  # no memory yet
        convolutions = [nn.Conv2d(1, 32, 3, padding=1), nn.GELU(), nn.Conv2d(32, 64, 3, stride=2), nn.GELU()]
        model = nn.Sequential(*convolutions, nn.Flatten(), nn.Linear(576, 10))
    if dist.is_initialized():
        fully_shard(model, mesh=dist.init_device_mesh(DEVICE.type, (dist.get_world_size(),)))
    report = shardow.materialize(model, path, device=DEVICE, dtype=dtype)  # names, shapes and checksums are compared
    print(f"{report['bytes_read']} bytes read in {report['seconds']:.3f} s")
    return model.eval()


@torch.no_grad()
def named(path: Path, dtype: torch.dtype | None = None) -> list[int]:
    """The digits that nobody trained with, as the averages read them."""
    with shardow.open(path) as file:  # a look into the file, without a model
        print(f"{len(file)} tensors; the last layer's first weights: {file.get_slice('5.weight')[0, :3]}")
    images = torch.tensor(load_digits().images[:300] / 8 - 1)[:, None]
    digits: list[int] = opened(path, dtype)(images.to(DEVICE, dtype or torch.float32)).argmax(1).tolist()
    return digits


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("path", type=Path)
    parser.add_argument("--dtype", type=lambda name: getattr(torch, name))
    if RANKS > 1:
        dist.init_process_group()
    digits = named(**vars(parser.parse_args()))
    right = sum(digit == label for digit, label in zip(digits, load_digits().target, strict=False))
    print(f"{digits[:20]}...: {right / len(digits):.1%} right")
    gc.collect()  # a sharded model that is alive when the interpreter ends can abort it
    if RANKS > 1:
        dist.destroy_process_group()
