"""DeepSpeed's engines on ranks of their own."""

from __future__ import annotations

import logging
import os
import sys
import warnings
from importlib.util import find_spec
from typing import Any

import framework_ranks
import pytest
import torch
import torch.distributed as dist
from torch import nn

of_deepspeed = pytest.mark.skipif(find_spec("deepspeed") is None, reason="no deepspeed: make test-slow installs it")
#: In fresh processes: DeepSpeed keeps its groups for the life of one.
run = framework_ranks.fresh


def deepspeed() -> Any:
    """Imported on the CPU, without compiling its collectives in shared memory, which takes minutes."""
    os.environ.update({"DS_ACCELERATOR": "cpu", "LOCAL_RANK": "0"})
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    import deepspeed

    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None  # type: ignore[attr-defined]
    deepspeed.init_distributed(dist_backend="gloo", auto_mpi_discovery=False, verbose=False, dist_init_required=False)
    return deepspeed


class Net(nn.Module):
    """Sizes that no number of ranks divides, a tied weight, a frozen one, one that nobody trains, buffers."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.norm, self.frozen = nn.Linear(7, 33), nn.LayerNorm(33), nn.Linear(33, 33, bias=False)
        self.second, self.last = nn.Linear(33, 33), nn.Linear(33, 5)
        self.third = nn.Linear(33, 33, bias=False)
        self.third.weight = self.second.weight
        self.frozen.weight.requires_grad_(False)
        self.register_buffer("seen", torch.zeros(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.seen += 1
        return self.last(torch.relu(self.third(torch.relu(self.second(self.frozen(self.norm(self.first(x))))))))  # type: ignore[no-any-return]


#: By name: what of DeepSpeed's configuration differs.
KINDS: dict[str, dict[str, Any]] = {
    "zero1": {"zero_optimization": {"stage": 1}, "bf16": {"enabled": True}},
    "zero2": {"zero_optimization": {"stage": 2}, "bf16": {"enabled": True}},
    "zero2-fp32": {"zero_optimization": {"stage": 2}},
    "bf16-optimizer": {"zero_optimization": {"stage": 1}, "bf16": {"enabled": True},
     "data_types": {"grad_accum_dtype": "fp32"}},
    "zero0": {"zero_optimization": {"stage": 0}, "bf16": {"enabled": True}},
    "zero3": {"zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 40}},
    "zero3-small-groups": {"zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0,
     "sub_group_size": 100}},
    "zero2-offload": {
        "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}, "bf16": {"enabled": True},
        "zero_force_ds_cpu_optimizer": False,
    },
    "zero3-offload": {
        "zero_optimization": {
            "stage": 3, "stage3_param_persistence_threshold": 40, "offload_optimizer": {"device": "cpu"},
            "offload_param": {"device": "cpu"},
        },
        "bf16": {"enabled": True}, "zero_force_ds_cpu_optimizer": False,
    },
    "zero3-bf16": {"zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 40},
     "bf16": {"enabled": True}},
}  # fmt: skip


def adam(net: nn.Module) -> torch.optim.Optimizer:
    trained = [p for p in net.parameters() if p.requires_grad]
    return torch.optim.AdamW([{"params": trained[:4]}, {"params": trained[4:], "lr": 3e-3}], lr=1e-2)


def engine(kind: str, model: nn.Module | None = None, **config: Any) -> Any:
    """Of a Net that AdamW trains, in two groups."""
    net = model or Net()
    base = {"train_micro_batch_size_per_gpu": 4, "zero_allow_untested_optimizer": True, "steps_per_print": 10**9}
    made, *_ = deepspeed().initialize(model=net, optimizer=adam(net), config={**base, **KINDS[kind], **config})
    return made


def batch(step: int) -> torch.Tensor:
    """This rank's own."""
    return torch.randn(4, 7, generator=torch.Generator().manual_seed(1000 * step + dist.get_rank()))


def train(made: Any, step: int) -> None:
    """One micro-batch."""
    made.backward(made(batch(step).to(made.get_data_types()[0])).float().square().mean())
    made.step()


def train_plain(net: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    """The same without DeepSpeed: each rank has all, in float32."""
    optimizer.zero_grad()
    net(batch(step)).square().mean().backward()
    for p in net.parameters():
        if p.grad is not None:
            dist.all_reduce(p.grad.div_(dist.get_world_size()))
    optimizer.step()


def whole(made: Any) -> dict[str, torch.Tensor]:
    """The masters as DeepSpeed itself gathers them; of what it does not train, the weights."""
    from deepspeed import zero
    from deepspeed.utils import safe_get_full_fp32_param

    groups = zip(getattr(made.optimizer, "fp16_groups", ()), getattr(made.optimizer, "fp32_groups", ()), strict=False)
    without_zero = {id(p): master for group, masters in groups for p, master in zip(group, masters, strict=True)}
    found = {}
    for name, p in made.module.named_parameters():
        value = without_zero.get(id(p), safe_get_full_fp32_param(p) if p.requires_grad else None)
        if value is None:
            with zero.GatheredParameters([p], enabled=hasattr(p, "ds_id")):
                value = p.detach().float().clone()
        found[name] = value.float().clone().reshape(getattr(p, "ds_shape", p.shape))
    return found
