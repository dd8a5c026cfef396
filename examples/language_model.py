"""Averages of a language model: a transformer of 10.8 M parameters learns Python's language reference, byte by byte,
sharded by FSDP2.

    torchrun --standalone --nproc-per-node 2 examples/language_model.py --steps 2000 --out out/language_model

The text is what help("assert") and the like show. Killed at any moment, the same command goes on from the last
checkpoint.
"""

from __future__ import annotations

import argparse
import gc
import math
from pathlib import Path
from pydoc_data.topics import topics

import torch
import torch.distributed as dist
from torch import nn

import shardow

DEVICE = torch.device("cuda", dist.get_node_local_rank()) if torch.cuda.is_available() else torch.device("cpu")


class Block(nn.TransformerEncoderLayer):
    def forward(self, x: torch.Tensor) -> torch.Tensor:  # the causal mask is all that tells it where a byte stands
        return super().forward(
            x, nn.Transformer.generate_square_subsequent_mask(x.shape[1], device=x.device), is_causal=True
        )


def bits_per_byte(model: nn.Module, windows: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(model(windows[:, :-1]), windows[:, 1:].flatten()) / math.log(2)


def train(steps: int, out: Path, context: int = 256) -> dict[str, float]:
    """Bits per byte of held-out text, by the weights and by their averages."""
    text = torch.tensor(list("\n".join(topics[name] for name in sorted(topics)).encode())).to(DEVICE)
    held_out, learned = text.unfold(0, context + 1, context).tensor_split([16])
    torch.manual_seed(0)
    blocks = [Block(384, 6, 4 * 384, 0.0, "gelu", batch_first=True, norm_first=True) for _ in range(6)]
    model = nn.Sequential(nn.Embedding(256, 384), *blocks, nn.LayerNorm(384), nn.Flatten(0, 1), nn.Linear(384, 256))
    # on CUDA also: mixed_precision=torch.bfloat16
    shardow.wrap(model, dist.init_device_mesh(DEVICE.type, (dist.get_world_size(),)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-4)
    ema = shardow.EMA(model, decay=shardow.schedules.debiased(0.995))
    checkpoints = shardow.Checkpoints(out, keep=2)
    if checkpoints.latest() is not None:
        checkpoints.restore(model, ema, optimizer, random=False)  # the windows below are drawn by the step
    for step in range(ema.step + 1, steps + 1):
        torch.manual_seed(1_000_003 * step + dist.get_rank())  # a resume draws the same batches
        optimizer.zero_grad()
        bits_per_byte(model, learned[torch.randint(len(learned), (16,))]).backward()
        optimizer.step()
        ema.update()
        if step % 200 == 0 or step == steps:
            checkpoints.save(step, model, ema, optimizer, asynchronous=step < steps)
    ema.export(out / "model", dtype="bfloat16")
    with torch.no_grad():
        found = {"weights": float(bits_per_byte(model, held_out))}
        with ema.swapped():  # on every rank, as FSDP's forward passes
            return {**found, "averages": float(bits_per_byte(model, held_out))}


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--out", type=Path, default=Path("out/language_model"))
    parser.add_argument("--context", type=int, default=256)
    dist.init_process_group()
    print(f"rank {dist.get_rank()}: {train(**vars(parser.parse_args()))}")
    gc.collect()  # a sharded model that is alive when the interpreter ends can abort it
    dist.destroy_process_group()
