"""What a launcher tells a program, for frameworks that run in a rank of ranks.run()."""

from __future__ import annotations

import gc
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch.optim.optimizer import register_optimizer_step_post_hook


@contextmanager
def launched(**environment: str) -> Iterator[None]:
    """As by torchrun, on one machine; what accelerate and transformers remember of it, and of_accelerators(), is
    forgotten afterwards.
    """
    import accelerate

    before, rank, world = dict(os.environ), str(dist.get_rank()), str(dist.get_world_size())
    begin = accelerate.PartialState.__init__
    os.environ.update({"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world})
    os.environ.update({"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1", "ACCELERATE_USE_CPU": "true", **environment})
    try:
        yield
    finally:
        gc.enable()  # which torchtitan disables
        accelerate.state.AcceleratorState._reset_state(True)
        accelerate.state.GradientState._reset_state()
        accelerate.PartialState.__init__ = begin
        os.environ.clear()
        os.environ.update(before)


@contextmanager
def killed_after(steps: int | None) -> Iterator[None]:
    """kill -9 of this process at the end of an optimizer's step, before what would follow it."""
    count = 0

    def count_steps(*_: Any) -> None:
        nonlocal count
        count += 1
        if count == steps:
            os.kill(os.getpid(), signal.SIGKILL)

    hook = register_optimizer_step_post_hook(count_steps)
    try:
        yield
    finally:
        hook.remove()


def equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def of_accelerators(sharded: bool) -> None:
    """accelerate's FSDP on CPUs: it shards where it believes to have accelerators. For a program that is
    ``launched()``, until its end.
    """
    from accelerate import PartialState
    from accelerate.utils import DistributedType

    def begin(self: Any, *args: Any, **kwargs: Any) -> None:
        own(self, *args, **kwargs)
        if sharded:
            self.distributed_type = DistributedType.MULTI_HPU

    own, PartialState.__init__ = PartialState.__init__, begin
