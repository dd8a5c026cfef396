"""A small diffusion transformer (DiT; Peebles and Xie, arXiv 2212.09748), how ranks share it, its loss and its sampler.

Rectified flow (Liu et al., arXiv 2209.03003): on a straight path x_t = (1 - t) image + t noise, the velocity is
learned. An Euler step of the sampling equation is a step of DDIM (Song et al., arXiv 2010.02502): deterministic, the
same noise gives the same image.
"""

from __future__ import annotations

import math

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F

from . import data


def time_features(time: torch.Tensor, width: int) -> torch.Tensor:
    """(n,) in [0, 1] to (n, width): sines and cosines of geometric frequencies."""
    frequencies = torch.exp(torch.arange(width // 2, device=time.device) * (-math.log(1000.0) / (width // 2 - 1)))
    angles = 1000.0 * time[:, None] * frequencies
    return torch.cat([angles.cos(), angles.sin()], dim=1)


def modulate(x: torch.Tensor, shift: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return x * (1 + scale[:, None]) + shift[:, None]


class Block(nn.Module):
    """Attention and an MLP, each shifted, scaled and gated by the condition; begins as the identity."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.condition = nn.Linear(width, 6 * width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(approximate="tanh"), nn.Linear(4 * width, width))
        nn.init.zeros_(self.condition.weight)
        nn.init.zeros_(self.condition.bias)

    def forward(self, x: torch.Tensor, condition: torch.Tensor) -> torch.Tensor:
        shift_a, scale_a, gate_a, shift_m, scale_m, gate_m = self.condition(F.silu(condition)).chunk(6, dim=1)
        x = x + gate_a[:, None] * self.attend(modulate(F.layer_norm(x, x.shape[-1:]), shift_a, scale_a))
        return x + gate_m[:, None] * self.mlp(modulate(F.layer_norm(x, x.shape[-1:]), shift_m, scale_m))

    def attend(self, x: torch.Tensor) -> torch.Tensor:
        n, tokens, width = x.shape
        q, k, v = self.qkv(x).view(n, tokens, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        return self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(n, tokens, width))


class DiT(nn.Module):
    """(images (n, 1, 8, 8), time (n,), labels (n,)) to a velocity of the images' shape."""

    def __init__(self, width: int = 96, depth: int = 4, heads: int = 4, patch: int = 2) -> None:
        super().__init__()
        self.patch, self.width = patch, width
        self.embed = nn.Conv2d(1, width, patch, stride=patch)
        self.position = nn.Parameter(0.02 * torch.randn((data.SIDE // patch) ** 2, width))
        self.time = nn.Sequential(nn.Linear(width, width), nn.SiLU(), nn.Linear(width, width))
        self.label = nn.Embedding(data.CLASSES, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(depth))
        self.final = nn.Linear(width, 2 * width)
        self.head = nn.Linear(width, patch * patch)
        for layer in (self.final, self.head):
            nn.init.zeros_(layer.weight)
            nn.init.zeros_(layer.bias)

    def forward(self, x: torch.Tensor, time: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        condition = self.time(time_features(time, self.width)) + self.label(labels)
        h = self.embed(x).flatten(2).transpose(1, 2) + self.position
        for block in self.blocks:
            h = block(h, condition)
        shift, scale = self.final(F.silu(condition)).chunk(2, dim=1)
        pixels = self.head(modulate(F.layer_norm(h, h.shape[-1:]), shift, scale))
        return F.pixel_shuffle(pixels.transpose(1, 2).unflatten(2, (data.SIDE // self.patch, -1)), self.patch)


def error(velocity: torch.Tensor, batch: data.Batch, world: int) -> torch.Tensor:
    """Squared error per pixel. Its mean over the ranks is that of the global batch, also where the parts are uneven."""
    errors = (velocity - (batch.noise - batch.images)).square().mean(dim=(1, 2, 3))
    return errors.sum() * (world / batch.size)


@torch.no_grad()
def sample(model: nn.Module, noise: torch.Tensor, labels: torch.Tensor, steps: int) -> torch.Tensor:
    """Images in [-1, 1], one for each noise (n, 1, 8, 8) and label."""
    x = noise.clone()
    for i in range(steps, 0, -1):
        x -= model(x, torch.full((len(x),), i / steps), labels) / steps
    return x.clamp_(-1, 1)


def wrap(model: DiT, how: str) -> nn.Module:
    """Shares ``model`` among all ranks, one block after the other where the wrapper is applied to parts."""
    from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

    world = dist.get_world_size()
    if how == "fsdp1":
        for i, block in enumerate(model.blocks):
            model.blocks[i] = FullyShardedDataParallel(block, device_id=torch.device("cpu"), use_orig_params=True)
        return FullyShardedDataParallel(model, device_id=torch.device("cpu"), use_orig_params=True)
    if how in ("ddp", "plain"):
        return nn.parallel.DistributedDataParallel(model) if how == "ddp" else model
    parts = shards(how, world)
    shape = (world // parts, parts) if how == "hsdp" else (parts,)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard")[-len(shape) :])
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def shards(how: str, world: int) -> int:
    """Parts of each parameter; HSDP has two copies of the model on an even number of ranks."""
    return world // 2 if how == "hsdp" and world % 2 == 0 else world


def average_gradients(model: nn.Module, how: str) -> None:
    """Does for a plain model what every wrapper does by itself."""
    if how == "plain" and dist.get_world_size() > 1:
        for parameter in model.parameters():
            if parameter.grad is not None:
                dist.all_reduce(parameter.grad)
                parameter.grad /= dist.get_world_size()


def ema_group(how: str) -> dist.ProcessGroup | None:
    """The ranks that hold replicas, of a plain model: no wrapper names them."""
    return dist.group.WORLD if how == "plain" else None
