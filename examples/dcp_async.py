"""Averages in torch.distributed.checkpoint, written while training goes on: an FSDP2 network learns handwritten digits.

    torchrun --standalone --nproc-per-node 2 examples/dcp_async.py --steps 300 --out out/dcp

The same command goes on from the last checkpoint, on any number of ranks. out/dcp/model is the averaged model.
"""

from __future__ import annotations

import argparse
import gc
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

DEVICE = torch.device("cuda", dist.get_node_local_rank()) if torch.cuda.is_available() else torch.device("cpu")


def train(steps: int, out: Path) -> dict[str, float]:
    """The share of held-out digits that is named rightly, by the weights and by their averages."""
    digits = load_digits()
    images, labels = torch.tensor(digits.images / 8 - 1).float().to(DEVICE), torch.tensor(digits.target).to(DEVICE)
    torch.manual_seed(0)
    layers = [nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 256), nn.GELU(), nn.Linear(256, 10)]
    model = nn.Sequential(nn.Flatten(), *layers).to(DEVICE)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    ema = shardow.EMA(model, decay=0.99)
    writing: Any = None
    saved: dict[str, Any] = {"step": 0}
    if whole := sorted(out.glob("step-*/.metadata")):  # which torch writes last
        saved = state(0, model, optimizer, ema)  # the EMA loads itself
        dcp.load(saved, checkpoint_id=whole[-1].parent)
        set_state_dict(model, optimizer, model_state_dict=saved["model"], optim_state_dict=saved["optimizer"])
    for step in range(saved["step"] + 1, steps + 1):
        torch.manual_seed(1_000_003 * step + dist.get_rank())  # a resume draws the same batches
        batch = torch.randint(300, len(images), (64,))
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(images[batch]), labels[batch]).backward()
        optimizer.step()
        ema.update()
        if step % 100 == 0 or step == steps:
            if writing is not None:
                writing.result()  # one at a time
            writing = dcp.async_save(state(step, model, optimizer, ema), checkpoint_id=out / f"step-{step:06}")
    if writing is not None:
        writing.result()
    ema.export(out / "model")
    weights = accuracy(model, images[:300], labels[:300])
    with ema.swapped():  # on every rank
        return {"weights": weights, "averages": accuracy(model, images[:300], labels[:300])}


@torch.no_grad()
def accuracy(model: nn.Module, images: torch.Tensor, labels: torch.Tensor) -> float:
    return float((model(images).argmax(1) == labels).float().mean())


def state(step: int, model: nn.Module, optimizer: torch.optim.Optimizer, ema: shardow.EMA) -> dict[str, Any]:
    model_state, optimizer_state = get_state_dict(model, optimizer)
    return {"step": step, "model": model_state, "optimizer": optimizer_state, "ema": ema}


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--out", type=Path, default=Path("out/dcp"))
    dist.init_process_group("cpu:gloo,cuda:nccl" if DEVICE.type == "cuda" else "gloo")  # async_save() talks on the CPU
    print(f"rank {dist.get_rank()}: {train(**vars(parser.parse_args()))}")
    gc.collect()  # a sharded model that is alive when the interpreter ends can abort it
    dist.destroy_process_group()
