"""DeepSpeed: averages of the float32 masters that ZeRO divides among ranks, where they are; nothing is gathered.

``ema(engine)`` is all that there is: an EMA of ``engine.module`` whose ``source=`` are the masters of the engine's
optimizer, and whose ``update()`` after ``engine.step()`` counts a step only if that changed weights. It is a function
rather than a callback since DeepSpeed has no events, and rather than an argument of EMA since only the engine knows
which of its steps were applied.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Any

from shardow import Schedule
from shardow.averaging.tracked import Source
from shardow.base.checks import invalid, unsupported
from shardow.ema import EMA
from shardow.integrations.common import MastersEMA
from shardow.sharding.masters import master_of
from shardow.sharding.slots import slots

#: An engine's optimizer keeps its masters under one of these: ZeRO-3's, ZeRO-1's and 2's, bf16_optimizer's; or, without
#: ZeRO, under the other two.
_DIVIDED = ("fp32_partitioned_groups_flat", "single_partition_of_fp32_groups", "fp32_groups_flat_partition")


def ema(engine: Any, decay: float | Schedule | Sequence[float | Schedule] = 0.9999, **options: Any) -> EMA:
    """Averages of what ``engine`` (``deepspeed.initialize()``) trains; call ``update()`` after each ``engine.step()``.
    Collective.

    ZeRO-1, 2 and 3, bf16_optimizer, and 16 bits without ZeRO: of the optimizer's float32 masters. Else of the weights.
    Files, exports and states are complete models by parameter name, for any other world size and stage.

    Args:
        decay, options: EMA's; neither ``source``, ``optimizer`` nor ``overlap``, and ``group`` is the engine's
            data-parallel ranks.

    Raises:
        NotImplementedError: masters on NVMe, or on another device than the weights; pipelines, experts, tensor
            parallelism, ZenFlow.
    """
    return _EMA(engine, decay, options)


class _EMA(MastersEMA):
    def __init__(self, engine: Any, decay: Any, options: dict[str, Any]) -> None:
        _refuse(engine)
        self._engine = engine
        options.setdefault("group", engine.seq_data_parallel_group)
        super().__init__(engine.module, decay, lambda: masters(engine), lambda: _addresses(engine.optimizer), options)

    def update(self, step: int | None = None, samples: float = 0.0) -> None:
        """After engine.step(): as EMA.update() where that step was applied. Else nothing: between the boundaries of an
        accumulation, and where gradients overflowed."""
        if self._engine.was_step_applied():
            super().update(step, samples)


def masters(engine: Any) -> dict[str, Source]:
    """What ``source=`` takes: this rank's masters by parameter; empty where the optimizer keeps none."""
    named = {id(slot.recorded): (slot.name, slot.recorded) for slot in reversed([*slots(engine.module, "parameter")])}
    divided = any(hasattr(engine.optimizer, name) for name in _DIVIDED)
    sources = _divided(engine.optimizer, [p for _, p in named.values()]) if divided else _whole(engine.optimizer)
    found = {id(p): source for p, source in sources}
    return {name: found[key] for key, (name, _) in named.items() if key in found}


Found = Iterator[tuple[Any, Source]]


def _divided(optimizer: Any, parameters: list[Any]) -> Found:
    """ZeRO-3's, of the same elements as ``ds_tensor``; else stretches of replicas, which may be empty."""
    flats = getattr(optimizer, "fp32_partitioned_groups_flat", None)
    kept = {flat.untyped_storage().data_ptr() for flat in flats or ()}
    for p in parameters:
        if (found := master_of(p)) is not None:
            if flats is not None and found[0].untyped_storage().data_ptr() not in kept:
                raise unsupported(
                    "offload_optimizer keeps masters on the host, weights are on a device; use offload_param too, or "
                    "neither"
                )
            yield p, found if flats is None else found[0]


def _whole(optimizer: Any) -> Found:
    """Every rank has all, tensor by tensor, or one after another."""
    groups = getattr(optimizer, "fp16_groups", [])
    kept = getattr(optimizer, "fp32_groups", None) or [
        flat.detach().split([p.numel() for p in group])
        for group, flat in zip(groups, getattr(optimizer, "fp32_groups_flat", []), strict=True)
    ]
    return zip(chain.from_iterable(groups), chain.from_iterable(kept), strict=True)


def _addresses(optimizer: Any) -> list[int]:
    kept = [
        *(flat for name in (*_DIVIDED, "fp32_groups_flat") for flat in getattr(optimizer, name, ())),
        *chain.from_iterable(getattr(optimizer, "fp32_groups", ())),
    ]
    return [tensor.data_ptr() for tensor in kept]


def _refuse(engine: Any) -> None:
    if not hasattr(engine, "was_step_applied") or not hasattr(getattr(engine, "optimizer", None), "param_groups"):
        raise invalid(
            "ema() takes the engine that deepspeed.initialize() returns, with an optimizer, not a "
            f"{type(engine).__name__}"
        )
    optimizer = engine.optimizer
    odd = {
        "keeps masters on NVMe, where nothing can be averaged in place: offload to 'cpu'": (
            getattr(optimizer, "swap_optimizer", False) or getattr(optimizer, "params_in_nvme_and_cpu", False)
        ),
        "is a pipeline, whose stages hold other layers under other names": engine.pipeline_parallelism,
        "has experts, which ranks hold under the same names": engine.has_moe_layers,
        "is tensor parallel: ranks hold other elements under the same names": engine.mp_world_size > 1,
        "links weights to masters of others (round_robin_gradients), as its own safe_get_full_fp32_param() shows; "
        "leave that out": (getattr(optimizer, "round_robin_gradients", False)),
        "updates its masters while it trains (ZenFlow)": bool(getattr(engine, "zenflow", False)),
    }
    for why, so in odd.items():
        if so:
            raise unsupported(f"this engine {why}; it is not averaged here")
