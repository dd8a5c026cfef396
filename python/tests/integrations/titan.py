"""torchtitan's own Trainer on CPUs, with a model that trains in no time.

It asks for CUDA and for packages that it does not use here (data sets, loggers, Triton's kernels); they are stood in
for.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import torch
from stubs import Stub
from torch import nn
from torch.distributed.fsdp import fully_shard

_STUBS = {
    name: Stub(name)
    for name in (
        "datasets",
        "datasets.distributed",
        "wandb",
        "torch.utils.tensorboard",
        "torchtitan.distributed.minimal_async_ep.kernels",
    )
    if name not in sys.modules
}
sys.modules.update(_STUBS)

from torchtitan.tools import utils  # noqa: E402

utils.device_type, utils.device_module = "cpu", torch.cpu

from examples import torchtitan_run  # noqa: E402
from torchtitan.components import metrics  # noqa: E402
from torchtitan.components.checkpoint import CheckpointManager  # noqa: E402
from torchtitan.components.dataloader import BaseDataLoader  # noqa: E402
from torchtitan.components.loss import CrossEntropyLoss  # noqa: E402
from torchtitan.components.optimizer import LRSchedulersContainer, default_adamw  # noqa: E402
from torchtitan.components.tokenizer import BaseTokenizer  # noqa: E402
from torchtitan.config import TrainingConfig  # noqa: E402
from torchtitan.distributed import utils as distributed  # noqa: E402
from torchtitan.protocols.model import BaseModel  # noqa: E402
from torchtitan.protocols.model_spec import ModelSpec  # noqa: E402
from torchtitan.protocols.state_dict_adapter import StateDictAdapter  # noqa: E402
from torchtitan.trainer import Trainer  # noqa: E402

from shardow.integrations.torchtitan import AveragedTrainer, EMAWeights  # noqa: E402

for name in [one for one in _STUBS if not one.startswith("torchtitan")]:  # others ask whether they are there
    del sys.modules[name]
distributed.set_pg_timeouts = lambda *_, **__: None  # whose barrier is of devices
metrics.build_device_memory_monitor = lambda: MagicMock(
    device_name="CPU", get_peak_stats=lambda: metrics.DeviceMemStats(*[0] * 6)
)


class Net(BaseModel):
    """Its layers, attention apart, which torchtitan has for devices alone."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseModel.Config):
        def update_from_config(self, *, config: Any, **_: Any) -> None:
            pass

        def get_nparams_and_flops(self, model: nn.Module, seq_len: int) -> tuple[int, int]:
            return sum(one.numel() for one in model.parameters()), 1

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.embedding, self.hidden, self.head = nn.Embedding(64, 17), nn.Linear(17, 23), nn.Linear(23, 64)

    def forward(self, tokens: torch.Tensor, **_: Any) -> torch.Tensor:
        return self.head(self.hidden(self.embedding(tokens)).tanh())

    def verify_module_protocol(self) -> None:
        pass

    def init_states(self, **_: Any) -> None:
        torch.manual_seed(0)
        for one in (self.embedding, self.hidden, self.head):
            one.reset_parameters()


def parallelize(model: nn.Module, *, parallel_dims: Any, **_: Any) -> nn.Module:
    if parallel_dims.fsdp_enabled:
        for one in (*model.children(), model):
            fully_shard(one, mesh=parallel_dims.get_mesh("dp_shard"))
    return model


class NoTokenizer(BaseTokenizer):
    @dataclass(kw_only=True, slots=True)
    class Config(BaseTokenizer.Config):
        pass

    def __init__(self, config: Any, **_: Any) -> None:
        super().__init__()

    def encode(self, *args: Any, **kwargs: Any) -> list[int]:
        return []

    def decode(self, *args: Any, **kwargs: Any) -> str:
        return ""

    def get_vocab_size(self) -> int:
        return 64


class Counting(BaseDataLoader):
    """The same batches at every world size; it goes on where it was saved."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):
        pass

    def __init__(self, config: Any, *, dp_rank: int, seq_len: int, local_batch_size: int, **_: Any) -> None:
        self.rank, self.shape, self.count = dp_rank, (local_batch_size, seq_len + 1), 0

    def __iter__(self) -> Iterator[Any]:
        while True:
            self.count += 1
            tokens = torch.randint(
                64, self.shape, generator=torch.Generator().manual_seed(1000 * self.count + self.rank)
            )
            yield {"input": tokens[:, :-1]}, tokens[:, 1:]

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.count = state_dict["count"]


class HuggingFaceNames(StateDictAdapter):
    def to_hf(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        return {f"model.{name}": one for name, one in state_dict.items()}

    def from_hf(self, hf_state_dict: dict[str, Any]) -> dict[str, Any]:
        return {name.removeprefix("model."): one for name, one in hf_state_dict.items()}


def without_averages(out: Path, steps: int = 4, adapter: Any = None) -> Trainer.Config:
    return Trainer.Config(
        model_spec=ModelSpec("net", "small", Net.Config(), parallelize, None, None, adapter),
        dump_folder=str(out),
        loss=CrossEntropyLoss.Config(),
        tokenizer=NoTokenizer.Config(),
        dataloader=Counting.Config(),
        optimizer=default_adamw(lr=1e-2),
        lr_scheduler=LRSchedulersContainer.Config(warmup_steps=1),
        training=TrainingConfig(local_batch_size=2, seq_len=16, steps=steps, disable_cuda_graphs=True),
        checkpoint=CheckpointManager.Config(enable=True, interval=2, last_save_model_only=False),
    )


def config_of(out: Path, steps: int = 4, **ema: Any) -> AveragedTrainer.Config:
    return torchtitan_run.averaged(without_averages(out, steps), EMAWeights.Config(**{"enable": True, **ema}))
