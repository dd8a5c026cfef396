"""A training run in small: everything that a checkpoint has, and steps that draw from the global generators."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import models
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import nn

import shardow

Make = Callable[[nn.Module], torch.optim.Optimizer]


def groups(model: nn.Module) -> list[dict[str, Any]]:
    """Two of them; the parameters of FSDP1's flat form belong to several layers each."""
    params = [p for p in model.parameters() if p.requires_grad]
    return [{"params": params[1:], "weight_decay": 0.1}, {"params": params[:1], "lr": 3e-3}]


OPTIMIZERS: dict[str, Make] = {
    "adamw-one": lambda model: torch.optim.AdamW(model.parameters(), lr=1e-2),
    "adamw": lambda model: torch.optim.AdamW(groups(model), lr=1e-2),
    "adamw-amsgrad": lambda model: torch.optim.AdamW(groups(model), lr=1e-2, amsgrad=True, foreach=False),
    "adamw-fused": lambda model: torch.optim.AdamW(groups(model), lr=1e-2, fused=True),
    "adamw-tensor-lr": lambda model: torch.optim.AdamW(model.parameters(), lr=torch.tensor(1e-2), foreach=False),
    "sgd": lambda model: torch.optim.SGD(groups(model), lr=1e-2),
    "sgd-momentum": lambda model: torch.optim.SGD(groups(model), lr=1e-2, momentum=0.9, nesterov=True),
    "nadam": lambda model: torch.optim.NAdam(groups(model), lr=1e-2),
    "rmsprop": lambda model: torch.optim.RMSprop(groups(model), lr=1e-2, momentum=0.9, centered=True),
    "adagrad": lambda model: torch.optim.Adagrad(groups(model), lr=1e-2),
}


class Run:
    def __init__(self, kind: str, optimizer: str = "adamw", seed: int = 0, freeze: str = "") -> None:
        world = dist.get_world_size() if dist.is_initialized() else 1
        plain = models.make(seed=seed)
        for name, p in plain.named_parameters():
            p.requires_grad_(name != freeze)
        self.model = models.PARALLEL[kind](plain, world)
        self.optimizer = OPTIMIZERS[optimizer](self.model)
        self.scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, 50)
        self.ema = shardow.EMA(self.model, decay=[0.5, 0.9])
        self.step = 0
        rank = dist.get_rank() if dist.is_initialized() and kind != "plain" else 0
        torch.manual_seed(rank)
        random.seed(rank)

    def train(self, steps: int) -> None:
        for _ in range(steps):
            self.optimizer.zero_grad()
            batch = torch.randn(8, models.INPUTS) * random.random()
            self.model(batch).square().sum().backward()
            self.optimizer.step()
            self.scheduler.step()
            self.ema.update()
            self.step += 1

    def parts(self) -> dict[str, Any]:
        return {"model": self.model, "averages": self.ema, "optimizer": self.optimizer, "scheduler": self.scheduler}

    def save(self, checkpoints: shardow.Checkpoints, **options: Any) -> Any:
        return checkpoints.save(self.step, **self.parts(), state={"step": self.step, "best": float("inf")}, **options)

    def restore(self, checkpoints: shardow.Checkpoints, **options: Any) -> dict[str, Any]:
        state = checkpoints.restore(**self.parts(), **options)
        self.step = state["step"]
        return state


def tensors_of(step: Path) -> dict[str, torch.Tensor]:
    """All that a step has, but for the random generators, which are their ranks'."""
    called = json.loads((step / "checkpoint.json").read_text()).get("shardow.files", {})  # where it was saved again
    asked = {file: name for name, file in called.items()}
    found = {
        f"{asked.get(file.name, file.name)}/{name}": tensor
        for file in step.glob("*.safetensors")
        for name, tensor in load_file(file).items()
    }
    return {name: tensor for name, tensor in found.items() if not name.endswith("/random")}


def equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    """To the last bit."""
    return one.keys() == other.keys() and all(
        one[name].dtype == other[name].dtype and torch.equal(bits(one[name]), bits(other[name])) for name in one
    )


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1).view(torch.uint8)


def at(checkpoints: shardow.Checkpoints, step: int) -> Path:
    return checkpoints.directory / f"step-{step:09}"
