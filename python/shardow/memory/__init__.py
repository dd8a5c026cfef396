"""What memory a run takes.

timeline() samples every rank during a block, draw() shows several of them side by side, apply() makes training steps take less, plan()
predicts and measure() counts what they hold.

May import: averages, model, ranks, base, errors, ema."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardow.base.checks import seconds, unsupported
from shardow.memory.drawing import Colours, figure_of
from shardow.memory.samples import Sampler, Samples
from shardow.memory.usage import Usage

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist
    from matplotlib.figure import Figure
    from torch import nn

    from shardow.ema import EMA
    from shardow.memory.switches import Switches
    from shardow.ranks.team import Team


@dataclass
class Timeline:
    """Of one block.

    ``ranks`` are all ranks' samples, on every rank, once the block has ended; while it runs, and where it raised, this rank's alone.
    """

    ranks: list[Samples] = field(default_factory=list)
    _sampler: Sampler | None = None

    def mark(self, what: str) -> None:
        """Names the instant, for the picture."""
        if self._sampler is not None:
            self._sampler.mark(what)

    def peaks(self) -> dict[str, int]:
        """Bytes of each rank.

        {"rank0/peak": the most that were resident, "rank0/above": above what was there at the start, "rank0/device": the most on its
        accelerator, ...}.
        """
        found = {}
        for one in self.ranks:
            found[f"rank{one.rank}/peak"] = one.peak
            found[f"rank{one.rank}/above"] = one.peak - one.before
            if one.device:
                found[f"rank{one.rank}/device"] = max(amount for _, amount in one.device)
        return found


@contextlib.contextmanager
def timeline(
    interval: float = 0.01, *, group: dist.ProcessGroup | None = None, timeout: float | timedelta | None = None
) -> Iterator[Timeline]:
    """Samples the memory of every rank during the block.

    Collective at its end: with torch.distributed, over ``group``, by default all ranks; if the block raises, nothing is exchanged::

        with shardow.memory.timeline() as t:
            model = build()
            t.mark("built")
            ...
        shardow.memory.draw({"": t}, "memory.png")

    Resident bytes (RSS) are read from /proc every ``interval`` seconds, proportional ones (PSS) as often as 2 % of the time allow, a
    device's from torch's allocator.

    Raises:
        NotImplementedError: there is no /proc; TimeoutError: a rank did not come to the end.
    """
    team = _team(group, timeout)
    if not sys.platform.startswith("linux"):
        raise unsupported(f"memory.timeline() reads /proc, which {sys.platform} does not have")
    sampler = Sampler(0 if team is None else team.rank, interval)
    found = Timeline([sampler.samples], sampler)
    sampler.start()
    try:
        yield found
    finally:
        sampler.stop()
        found._sampler = None
    if team is not None:
        everybody = team.gather("memory.timeline()", json.dumps(asdict(sampler.samples)).encode())
        found.ranks = [Samples(**json.loads(one)) for one in everybody]


def draw(timelines: Mapping[str, Timeline], path: str | Path) -> None:
    """Timelines side by side, by their titles, with one scale.

    Each rank's resident memory above what it had at the start, and its device's memory where there is one. Needs matplotlib; the suffix of
    ``path`` is the format.
    """
    colours = Colours()
    figure(timelines, colours).savefig(path, dpi=160, facecolor=colours.ground)


def figure(timelines: Mapping[str, Timeline], colours: Colours | None = None) -> Figure:
    """The matplotlib figure that draw() writes, for reports with colours of their own."""
    return figure_of({title: one.ranks for title, one in timelines.items()}, colours or Colours())


def apply(
    model: nn.Module,
    bf16: bool = True,
    activation_checkpointing: bool | str | Callable[[str, nn.Module], bool] = True,
    *,
    attention_weights: bool = False,
) -> Switches:
    """Makes training steps of ``model`` take less memory, until ``remove()`` or the end of a ``with`` block.

    Names, parameters and hooks stay; sharded models too.

    Args:
        bf16: forward in training runs under ``torch.autocast(..., torch.bfloat16)``; weights and optimizer stay as they are. In evaluation
            nothing changes.
        activation_checkpointing: True or "blocks": the repeated blocks (members of a ModuleList or Sequential that has several of their
            class), or those that a predicate of (name, module) chooses (of what lies in another that it chooses, the outermost), keep their
            inputs alone in a training forward, and are run again in backward (``torch.utils.checkpoint``, not reentrant): the same
            gradients, bit for bit, where the forward is deterministic. In evaluation and under no_grad nothing changes.
        attention_weights: False: calls of nn.MultiheadAttention that do not say ``need_weights`` give None for them, so that they are never
            built; also in evaluation. Values differ in the last digits, since another kernel computes them.

    Raises:
        ValueError: there are no such blocks.
    """
    from shardow.memory.switches import put_on

    return put_on(model, bf16, activation_checkpointing, attention_weights)


def plan(
    model_or_shapes: nn.Module | Mapping[str, Any],
    ranks: int = 1,
    sharding: str = "fsdp2",
    *,
    optimizer: str | type[torch.optim.Optimizer] | torch.optim.Optimizer | None = "adamw",
    batch: Any = None,
    switches: Mapping[str, Any] | None = None,
    shards: int | None = None,
    averages: int = 1,
    loss: Callable[[Any], Any] | None = None,
    device: torch.device | str | None = None,
) -> Usage:
    """Predicts what training will hold on the fullest rank, in bytes.

    Weights, gradients, optimizer, averages, activations, and their total. Local; allocates nothing, and leaves the model alone.

        print(shardow.memory.plan(model, ranks=8, batch=(32, 3, 64, 64), switches={"bf16": True}))

    Not in it: temporary buffers of operations and collectives, what allocators waste, libraries' workspaces.

    Args:
        model_or_shapes: the model before it is sharded, with values or on meta; or {name: shape}, {name: (shape, dtype)}, {name: tensor},
            all trainable but integers. Frozen parameters have neither gradients nor optimizer state nor averages.
        ranks: that train together.
        sharding: "plain", "ddp", "fsdp1", "fsdp2" (every parameter sharded along its rows), or "hsdp" with ``shards``.
        optimizer: "adamw", "sgd", "sgd-momentum" or another of torch.optim's names, a class, an instance (its groups and their options
            count), or None. Its state is that of a step on meta.
        batch: one rank's: a tensor or its shape, or (shape, dtype); a tuple of such, as forward() takes them; or a dict by the names of
            forward()'s arguments. Only shapes count. None: activations are not known, and are None in the result; so they are with shapes
            in place of a model.
        switches: what ``apply(model, **switches)`` will be given, with its defaults for what is not said; None: no switch is on.
        shards: under "hsdp", ranks that share one copy of the model.
        averages: how many (one for each decay), float32, divided among all ranks as EMA does: a plain model's need ``EMA(..., group=)`` for
            that.
        loss: of the model's output, where that is not the loss; what it keeps is counted too.
        device: whose kernels are planned for; None: the model's, or if that is on meta the accelerator, or the CPU.

    Returns:
        A dict that prints as a table; with "saves", what each switch takes away from the activations.

    Raises:
        ValueError: options or shapes that make no sense, a model that is sharded already, a batch that the model refuses.
        NotImplementedError: a forward pass that depends on values, an optimizer that can't step on meta.
    """
    from shardow.memory.prediction import make_plan

    return make_plan(model_or_shapes, ranks, sharding, optimizer, batch, switches, shards, averages, loss, device)


def measure(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    batch: Any = None,
    *,
    ema: EMA | nn.Module | None = None,
    loss: Callable[[Any], Any] | None = None,
) -> Usage:
    """Counts the bytes that this rank holds now, by plan()'s keys: after an optimizer step and before zero_grad() there are all of them.

    On CUDA also "device_peak".

    With a batch, or under DDP or a sharding, call it where every rank does: it runs a forward pass, as in training but without backward.
    Weights, gradients, optimizer, buffers and torch's random state are what they were afterwards; hooks on the model are called.

    Args:
        model: sharded or not, with the switches that are on it.
        batch: tensors as for plan(), with values; None: activations are None.
        ema: a shardow.EMA, or a module that holds averages.
        loss: as for plan().

    Raises:
        ValueError: a model on meta; whatever the forward pass raises.
    """
    from shardow.memory.measurement import take_measure

    return take_measure(model, optimizer, batch, ema, loss)


def _team(group: dist.ProcessGroup | None, timeout: float | timedelta | None) -> Team | None:
    torch = sys.modules.get("torch")
    if torch is None or not torch.distributed.is_available() or not torch.distributed.is_initialized():
        return None
    from shardow.ranks.team import Team

    return Team(group or torch.distributed.group.WORLD, seconds(timeout))


__all__ = ["Colours", "Switches", "Timeline", "Usage", "apply", "draw", "figure", "measure", "plan", "timeline"]


def __dir__() -> list[str]:
    return __all__


if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        """Switches need torch, as nothing else here does before it is called."""
        if name == "Switches":
            from shardow.memory.switches import Switches

            return Switches
        raise AttributeError(f"module 'shardow.memory' has no attribute {name!r}")
