"""Supports DeepSpeed's ZeRO-3, where a parameter is empty, and each rank has a range of it in ``ds_tensor``, whose end
is padded on the last ranks.

DeepSpeed is not imported: parameters bear its marks. Small ones, and those that a forward or the user gathered, show
all elements for a while, and the next forward would use them: such copies are freed when ranges have been written, and
that forward gathers them anew. To read ranges nothing has to be freed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, cast

import torch
import torch.distributed as dist

from shardow import _core
from shardow.base.checks import invalid, unsupported
from shardow.sharding.local import Adapter, LocalTensor
from shardow.sharding.slots import Slot, by_tensor


def is_partitioned(parameter: torch.Tensor) -> bool:
    return getattr(parameter, "ds_tensor", None) is not None


class Zero3Adapter(Adapter):
    hidden: list[LocalTensor]

    def __init__(self, walked: Iterable[Slot]) -> None:
        partitioned = by_tensor(slot for slot in walked if is_partitioned(slot.recorded))
        self.hidden = [_partition(places) for places in partitioned.values()]
        self.owned = set(partitioned)

    def shards(self) -> Iterator[torch.Tensor]:
        return (local.shown.ds_tensor for local in self.hidden)

    def reshard(self, refuse_written: bool = False) -> None:
        """Frees nothing, since ranges are read without the copies; refuses as Adapter.reshard() does."""
        for local in self.hidden if refuse_written else ():
            begin = begin_of(local.shown)
            whole = local.shown.detach().view(-1)[begin : begin + local.region.size]
            if whole.numel() == local.region.size and not torch.equal(
                whole.view(torch.uint8), local.memory().view(torch.uint8)
            ):
                raise invalid(
                    f"'{local.name}' was written while it is gathered, in deepspeed.zero.GatheredParameters(...): "
                    "leave that block first, which gives each rank its stretch"
                )

    def written(self) -> None:
        gathered = [local.shown for local in self.hidden if local.shown.ds_status.name != "NOT_AVAILABLE"]
        for optimizer in dict.fromkeys(getattr(parameter, "_z3_optimizer", None) for parameter in gathered):
            if optimizer is not None:
                # as before each of its steps; waits for parameters that are being prefetched
                optimizer.parameter_offload.partition_all_parameters()
        for parameter in gathered:
            if parameter.ds_status.name != "NOT_AVAILABLE":  # a model without an optimizer
                parameter.partition()


def begin_of(parameter: Any) -> int:
    """Returns the number of the first element in this rank's range."""
    begin: int = min(parameter.ds_tensor.ds_numel * dist.get_rank(parameter.ds_process_group), parameter.ds_numel)
    return begin


def _partition(places: Sequence[Slot]) -> LocalTensor:
    names, parameter = list(dict.fromkeys(slot.name for slot in places)), cast(Any, places[0].recorded)
    _refuse(names[0], parameter)
    begin, total = begin_of(parameter), parameter.ds_numel
    region = _core.Region.whole(list(parameter.ds_shape)).window(
        begin, min(begin + parameter.ds_tensor.ds_numel, total)
    )

    def memory() -> torch.Tensor:
        """Returns this rank's range without its padding."""
        elements: torch.Tensor = parameter.ds_tensor.detach()[: region.size]
        return elements

    return LocalTensor(names[0], memory(), region, parameter, (), True, tuple(names[1:]), memory)


def _refuse(name: str, p: Any) -> None:
    if p.ds_tensor.final_location == "nvme":
        raise unsupported(f"'{name}' is offloaded to NVMe, where nothing can be averaged in place; offload to 'cpu'")
    if hasattr(p.ds_tensor, "ds_quant_scale"):
        raise unsupported(f"'{name}' is kept quantised (zero_quantized_nontrainable_weights); leave that out")
    if getattr(p, "ds_secondary_tensor", None) is not None:
        why = "a second partition (zero_hpz_partition_size), which writes here would not reach"
        raise unsupported(f"'{name}' has {why}; leave that out")
