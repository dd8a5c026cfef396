"""Ways to save a whole training checkpoint, side by side: ours, torch's DCP, torch_checkpointing."""

from __future__ import annotations

import importlib.util
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

WORLD = 2
LAYERS = 8


class Training:
    """Everything has one value, which a kill's remains are compared with."""

    def __init__(self, gib: float) -> None:
        import shardow

        width = max(8, int((gib * 2**30 / 4 / 4 / LAYERS) ** 0.5) // 8 * 8)
        self.model = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(LAYERS)))
        for layer in self.model:
            fully_shard(layer)
        fully_shard(self.model)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), foreach=False)
        self.ema = shardow.EMA(self.model, decay=0.5)
        self.become(0)

    @torch.no_grad()
    def become(self, value: int) -> None:
        for p in self.model.parameters():
            p.fill_(value)
            state = self.optimizer.state[p]
            if state:
                state["exp_avg"].fill_(value)
                state["exp_avg_sq"].fill_(value)
            else:
                state |= {
                    "step": torch.tensor(float(value)),
                    "exp_avg": torch.full_like(p, value),
                    "exp_avg_sq": torch.full_like(p, value),
                }
        for average in self.averages().values():
            average.to_local().fill_(value) if hasattr(average, "to_local") else average.local.fill_(value)  # type: ignore[attr-defined]

    def averages(self) -> dict[str, torch.Tensor]:
        found: dict[str, torch.Tensor] = self.ema.state_dict()["averages"]
        return found

    def state_dict(self) -> dict[str, Any]:
        """As torch's own ways want it."""
        from torch.distributed.checkpoint.state_dict import get_state_dict

        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer, "averages": self.averages()}

    def values(self) -> set[float]:
        """Of all that this rank holds."""
        tensors = [p.to_local() for p in self.model.parameters()]
        tensors += [
            state[key].to_local() for state in self.optimizer.state.values() for key in ("exp_avg", "exp_avg_sq")
        ]
        tensors += [average.local for average in self.averages().values()]  # type: ignore[attr-defined]
        return {value for tensor in tensors for value in tensor.unique().tolist()}


# ---- the candidates: save() gives a function that waits until everything is written


@dataclass
class Way:
    training: Training
    path: Path

    def save(self) -> Callable[[], object]:
        raise NotImplementedError

    def load(self) -> None:
        raise NotImplementedError

    def make_room(self) -> None:
        """Before one checkpoint takes the place of another."""

    def close(self) -> None:
        pass


class Shardow(Way):
    asynchronous = False

    def save(self) -> Callable[[], object]:
        found = self._checkpoints().save(
            1, self.training.model, self.training.ema, self.training.optimizer, asynchronous=self.asynchronous
        )
        return found.wait if self.asynchronous else lambda: None

    def load(self) -> None:
        self._checkpoints().restore(self.training.model, self.training.ema, self.training.optimizer, random=False)

    def _checkpoints(self) -> Any:
        import shardow

        return shardow.Checkpoints(self.path)


class ShardowAsync(Shardow):
    asynchronous = True


class Dcp(Way):
    def save(self) -> Callable[[], object]:
        import torch.distributed.checkpoint as dcp

        dcp.save(self.training.state_dict(), checkpoint_id=self.path)
        return lambda: None

    def load(self) -> None:
        import torch.distributed.checkpoint as dcp
        from torch.distributed.checkpoint.state_dict import set_state_dict

        found = self.training.state_dict()
        dcp.load(found, checkpoint_id=self.path)
        set_state_dict(
            self.training.model,
            self.training.optimizer,
            model_state_dict=found["model"],
            optim_state_dict=found["optimizer"],
        )


class DcpAsync(Dcp):
    def save(self) -> Callable[[], object]:
        import torch.distributed.checkpoint as dcp

        future: Any = dcp.async_save(self.training.state_dict(), checkpoint_id=self.path)
        return future.result  # type: ignore[no-any-return]


class DcpConsolidated(Way):
    """Files that other tools read, as ours are: safetensors in global layout. Tensors alone; what is no tensor has no
    place there.
    """

    def save(self) -> Callable[[], object]:
        import torch.distributed.checkpoint as dcp

        flat = self._flat()
        writer = dcp.HuggingFaceStorageWriter(
            str(self.path),
            fqn_to_index_mapping=dict.fromkeys(flat, 1),
            save_distributed=True,
            enable_consolidation=True,
        )
        dcp.save(flat, storage_writer=writer)
        return lambda: None

    def load(self) -> None:
        import torch.distributed.checkpoint as dcp

        dcp.load(self._flat(), storage_reader=dcp.HuggingFaceStorageReader(str(self.path)))

    def make_room(self) -> None:
        if dist.get_rank() == 0:
            shutil.rmtree(self.path, ignore_errors=True)
            self.path.mkdir(parents=True)
        dist.barrier()

    def _flat(self) -> dict[str, torch.Tensor]:
        found = self.training.state_dict()
        states = {
            f"{name}.{key}": one
            for name, state in found["optimizer"]["state"].items()
            for key, one in state.items()
            if one.ndim
        }
        parts = {"model": found["model"], "optimizer": states, "averages": found["averages"]}
        return {f"{part}.{name}": one for part, tensors in parts.items() for name, one in tensors.items()}


class TorchCheckpointing(Way):
    """As its page on machines without CUDA says; 0.1's direct writes fail on ext4. Training may change weights when the
    lock can be had.
    """

    manager: Any = None

    def _config(self) -> Any:
        from torch_checkpointing.config import SyncCheckpointSaverConfig

        return SyncCheckpointSaverConfig()

    def _manager(self) -> Any:
        from torch_checkpointing import CheckpointManager
        from torch_checkpointing.storage.filesystem import LocalFileSystemStorageConfig

        storage = LocalFileSystemStorageConfig(use_direct_io=False)
        self.manager = self.manager or CheckpointManager.Config(save=self._config(), storage_config=storage).build()
        return self.manager

    def _payload(self) -> dict[str, Any]:
        found = self.training.state_dict()
        averages = {name: piece.local for name, piece in found["averages"].items()}  # at the same number of ranks alone
        return {**found, "averages": averages}

    def save(self) -> Callable[[], object]:
        future = self._manager().save(str(self.path), self._payload())
        with self._manager().lock():
            return (lambda: None) if future is None else future.result

    def load(self) -> None:
        self._manager().load(str(self.path), into=self._payload())

    def make_room(self) -> None:
        """It refuses to write over what is there: "Delete it explicitly if it is meant to be replaced"."""
        if dist.get_rank() == 0:
            shutil.rmtree(self.path, ignore_errors=True)
        dist.barrier()

    def close(self) -> None:
        if self.manager is not None:
            self.manager.close()


class TorchCheckpointingAsync(TorchCheckpointing):
    def _config(self) -> Any:
        from torch_checkpointing.config import AsyncCheckpointSaverConfig
        from torch_checkpointing.staging import CheckpointStagerConfig

        staging = CheckpointStagerConfig(use_pinned_memory=False, use_non_blocking_copy=False)
        return AsyncCheckpointSaverConfig(staging_config=staging)


WAYS: dict[str, type[Way]] = {
    "shardow, asynchronous": ShardowAsync,
    "shardow": Shardow,
    "DCP, asynchronous": DcpAsync,
    "DCP": Dcp,
    "DCP, consolidated": DcpConsolidated,
}
if importlib.util.find_spec("torch_checkpointing"):
    WAYS |= {"torch_checkpointing, asynchronous": TorchCheckpointingAsync, "torch_checkpointing": TorchCheckpointing}
