"""DeepSpeed's ZeRO-3: a parameter is empty, and each rank has a stretch of it in ``ds_tensor``, whose end is padded on
the last ranks.

Nothing is imported: parameters bear DeepSpeed's marks. Small ones, and those that a forward or the user gathered, show
all elements for a while, and the next forward would use them: such copies are freed when stretches have been written,
and that forward gathers them anew. To read stretches nothing has to be freed.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from shardow import _core
from shardow.base.checks import invalid, unsupported
from shardow.model.local import Adapter, HiddenTensor
from shardow.model.slots import Slot, by_tensor


@dataclass(eq=False, slots=True)
class Partition(HiddenTensor):
    """A parameter's stretch, from element ``begin`` on, without its padding."""

    begin: int = 0

    def memory(self) -> torch.Tensor:
        found: torch.Tensor = self.shown.ds_tensor.detach()[: self.region.size]
        return found

    def refuse_written(self) -> None:
        """Raises where the gathered copy was written: that has not reached the ranks' stretches yet."""
        whole = self.shown.detach().view(-1)[self.begin : self.begin + self.region.size]
        if whole.numel() == self.region.size and not torch.equal(
            whole.view(torch.uint8), self.memory().view(torch.uint8)
        ):
            block = (
                "in deepspeed.zero.GatheredParameters(...): leave that block first, which gives each rank its stretch"
            )
            raise invalid(f"'{self.name}' was written while it is gathered, {block}")


def is_partitioned(parameter: torch.Tensor) -> bool:
    return getattr(parameter, "ds_tensor", None) is not None


def groups_of(tensors: Iterable[torch.Tensor]) -> list[dist.ProcessGroup]:
    """Of the ranks that have stretches."""
    if "deepspeed" not in sys.modules:
        return []
    found = (tensor.ds_process_group for tensor in tensors if is_partitioned(tensor))  # type: ignore[attr-defined]
    return list({id(group): group for group in found}.values())


class Zero3Adapter(Adapter):
    hidden: list[Partition]

    def __init__(self, walked: Iterable[Slot]) -> None:
        found = (
            by_tensor(slot for slot in walked if is_partitioned(slot.recorded)) if "deepspeed" in sys.modules else {}
        )
        self.hidden = [_partition(places) for places in found.values()]
        self._owned = set(found)

    def shards(self) -> Iterator[torch.Tensor]:
        return (one.shown.ds_tensor for one in self.hidden)

    def refuse_written(self) -> None:
        for partition in self.hidden:
            partition.refuse_written()

    def written(self) -> None:
        gathered = [one for one in self.hidden if one.shown.ds_status.name != "NOT_AVAILABLE"]
        optimizers = {
            id(one): one for one in (getattr(one.shown, "_z3_optimizer", None) for one in gathered) if one is not None
        }
        for optimizer in optimizers.values():
            # as before each of its steps; waits for what is being prefetched
            optimizer.parameter_offload.partition_all_parameters()
        for one in gathered:
            if one.shown.ds_status.name != "NOT_AVAILABLE":  # a model without an optimizer
                one.shown.partition()


def _partition(places: Sequence[Slot]) -> Partition:
    names, parameter = [slot.name for slot in places], places[0].recorded
    p: Any = parameter
    _refuse(names[0], p)
    each, rank, total = p.ds_tensor.ds_numel, dist.get_rank(p.ds_process_group), p.ds_numel
    begin, end = min(rank * each, total), min((rank + 1) * each, total)
    region = _core.Region.whole(list(p.ds_shape)).window(begin, end)
    tensor = p.ds_tensor.detach()[: end - begin]
    return Partition(names[0], tensor, region, p.requires_grad, (), True, tuple(dict.fromkeys(names[1:])), p, begin)


def _refuse(name: str, p: Any) -> None:
    odd = {
        "is offloaded to NVMe, where nothing can be averaged in place; offload to 'cpu'": p.ds_tensor.final_location
        == "nvme",
        "is kept quantised (zero_quantized_nontrainable_weights); leave that out": hasattr(
            p.ds_tensor, "ds_quant_scale"
        ),
        "has a second partition (zero_hpz_partition_size), which writes here would not reach; leave that out": (
            getattr(p, "ds_secondary_tensor", None) is not None
        ),
    }
    for why, so in odd.items():
        if so:
            raise unsupported(f"'{name}' {why}")
