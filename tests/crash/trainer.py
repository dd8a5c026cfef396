"""A rank of a run that saves one step after the other, until it is killed; every value of a step is the step's
number."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import safe_open
from torch import nn
from torch.distributed.fsdp import fully_shard

import shardow

WIDTH = 300
FILES = {"model.safetensors", "ema-0.5.safetensors", "optimizer.safetensors", "state.safetensors", "checkpoint.json"}


class Trainer:
    def __init__(self, root: Path, group: bool = True) -> None:
        self.model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
        if group:
            fully_shard(self.model)
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 1000)
        self.ema = shardow.EMA(self.model, decay=0.5)
        self.checkpoints = shardow.Checkpoints(root, keep=2, timeout=20.0)

    def parts(self) -> dict[str, Any]:
        return {"model": self.model, "averages": self.ema, "optimizer": self.optimizer, "scheduler": self.scheduler}

    @torch.no_grad()
    def become(self, step: int) -> None:
        for p in self.model.parameters():
            p.fill_(step)
            state = {
                "step": torch.tensor(float(step)),
                "exp_avg": torch.full_like(p, step),
                "exp_avg_sq": torch.full_like(p, step),
            }
            self.optimizer.state[p] = state
        self.scheduler.last_epoch = step
        self.ema.reset()

    def save(self, step: int, asynchronous: bool) -> Any:
        state = {"step": step, "values": torch.full((1000,), float(step))}
        return self.checkpoints.save(step, **self.parts(), state=state, asynchronous=asynchronous)

    def resume(self) -> int:
        if self.checkpoints.latest() is None:
            return 0
        return int(self.checkpoints.restore(**self.parts(), random=False)["step"])


def rank_main(rank: int, world: int, port: int, round_: int, root: str, asynchronous: bool, reported: Any) -> None:
    """``reported``: shared memory, in which rank 0 says which step was saved."""
    torch.set_num_threads(1)
    store = dist.PrefixStore(f"round{round_}", dist.TCPStore("127.0.0.1", port, is_master=False))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
    trainer = Trainer(Path(root))
    step, handle = trainer.resume(), None
    while True:
        step += 1
        trainer.become(step)
        before, handle = handle, trainer.save(step, asynchronous)
        if rank == 0 and not asynchronous:
            reported.value = step
        elif rank == 0 and before is not None:
            before.wait()
            reported.value = step - 1


def look_at(directory: Path, step: int) -> None:
    """Every part is there, whole, and of that step, as other tools see it."""
    assert {path.name for path in directory.iterdir()} >= FILES
    manifest = json.loads((directory / "checkpoint.json").read_text())
    assert manifest["step"] == step
    assert manifest["scheduler"][""]["last_epoch"] == step
    assert manifest["state"]["step"] == step
    for name in manifest["files"]:
        with safe_open(directory / name, "pt") as file:
            assert file.metadata()["shardow.save"] == manifest["save"]
            tensors = {key: file.get_tensor(key) for key in file.keys() if key != "random"}  # noqa: SIM118
        assert tensors
        assert all((tensor == step).all() for tensor in tensors.values()), name
