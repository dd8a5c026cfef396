"""``utils/distributed.py`` of Self-Forcing (guandeh17), Causal-Forcing (thu-ml) and their kin: EMA_FSDP, fsdp_wrap(),
fsdp_state_dict(), and the model.pt of their trainers. Names, arithmetic (``shadow.mul_(d).add_(p.float(), alpha=1 -
d)``) and keys are upstream's; averages live where the weights are."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import CPUOffload, FullyShardedDataParallel, MixedPrecision, ShardingStrategy
from torch.distributed.fsdp.wrap import size_based_auto_wrap_policy, transformer_auto_wrap_policy

from shardow import Schedule, errors
from shardow.averaging import copies
from shardow.averaging.model_averages import ModelAverages
from shardow.averaging.options import Replicas
from shardow.base.checks import invalid, one_of
from shardow.compat._impl import files
from shardow.compat._impl.swapped_model_proxy import load_averages, ranks_of
from shardow.ema import EMA, model_averages
from shardow.files.checkpoint import full_state_dict
from shardow.merging import foreign
from shardow.schedules import as_schedules
from shardow.sharding.match import compare
from shardow.sharding.names import called, model_and_root, without_wrappers
from shardow.sharding.slots import slots
from shardow.sharding.view import find
from shardow.start.materialize import materialize


class EMA_FSDP:
    """Averages of every parameter of ``fsdp_module``, frozen ones too, or of its ``.module``. Collective where ranks
    share it.

    Args:
        decay: weight kept on the old average, in [0, 1]; or a Schedule of shardow.schedules.
        start_step: until then updates copy the weights; replaces averages made late, at an ``ema_start_step``.
        device: where the averages live: the host, as in upstream; None: with their weights.
        replicas: "split": ranks that hold the same weights (HSDP, DDP) divide averages and work; "copy": as in
            upstream.
        group, timeout: as in shardow.EMA.

    ``ema`` is the shardow.EMA behind it, for stats(), distance(), export() and attach().
    """

    def __init__(
        self, fsdp_module: Any, decay: float | Schedule = 0.999, *, start_step: int = 0,
        device: torch.device | str | None = "cpu", replicas: Replicas = "split",
        group: dist.ProcessGroup | None = None, timeout: float | timedelta | None = None,
    ) -> None:  # fmt: skip
        self._model, root = model_and_root(fsdp_module)
        self.ema = EMA(
            self._model, decay, device=device, rule="mul_add", params="all", stochastic=False, start_step=start_step,
            replicas=replicas, group=group, timeout=timeout,
        )  # fmt: skip
        name_of = called(root)
        self._names = {name: name_of(name) for name in self._averages.averages()}  # {clean: upstream's}
        self._is_copy = False

    @property
    def _averages(self) -> ModelAverages:
        return model_averages(self.ema)

    @property
    def decay(self) -> float:
        """Decay of the next update; may be set to a number or a Schedule at any time."""
        return self._averages.engine.decays[0]

    @decay.setter
    def decay(self, decay: float | Schedule) -> None:
        state = json.loads(self._averages.engine.state())
        state["schedules"] = [json.loads(schedule.to_json()) for schedule in as_schedules(decay)]
        self._averages.engine.set_state(json.dumps(state))

    @property
    def shadow(self) -> dict[str, torch.Tensor]:
        """Returns this rank's float32 part of each average, by the names of ``fsdp_module.module.named_parameters()``:
        the memory itself. A part that is not the whole is 1-D, in the order of the weight's own memory."""
        return Shadow(self.state_dict())

    @shadow.setter
    def shadow(self, shadow: Mapping[str, torch.Tensor]) -> None:
        """Loads as load_state_dict() does; collective too."""
        self.load_state_dict(shadow)

    @torch.no_grad()
    def update(self, fsdp_module: Any = None) -> None:
        """Updates the averages after an optimizer step; no communication. Raises ValueError and KeyError where the
        module or a parameter is another one."""
        if fsdp_module is not None:
            self._refuse_other(fsdp_module)
        try:
            self.ema.update()
        except errors.InvalidArgumentError as error:
            raise invalid(str(error), KeyError) from None

    def _refuse_other(self, module: Any) -> None:
        """Raises for another model. An EMA_FSDP from a copy or a pickle has a copy of the model; the first module that
        update() gets takes its place."""
        model = self._model if module is self._model else model_and_root(module)[0]
        if self._is_copy and model is not self._model:
            made = EMA(model, self._averages.engine.schedules, **self._averages.arguments)
            made.load_state_dict(self.ema.state_dict())
            self.ema, self._model, self._is_copy = made, model, False
        if model is not self._model and [*map(id, model.parameters())] != [*map(id, self._model.parameters())]:
            way_out = "make an EMA_FSDP of it and load this one's state_dict()"
            raise invalid(f"update(): this is not the module that the averages are of; {way_out}", KeyError)

    def __getstate__(self) -> dict[str, Any]:
        """Returns a state that includes the model. Raises NotImplementedError where ranks share it."""
        self._averages.to_copy("copied")
        return {**self.__dict__, "_is_copy": True}

    # ---- state

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Returns this rank's parts, without a copy, as ``shadow``; for load_state_dict() of the same sharding, and for
        torch.distributed.checkpoint. For the whole: full_state_dict(), save()."""
        return {self._names[name]: tensor for name, tensor in self._averages.averages().items()}

    def load_state_dict(self, sd: Mapping[str, torch.Tensor]) -> None:
        """Loads this rank's parts, or full tensors on every rank, with or without wrappers in their keys. Collective.
        Raises ValueError, on every rank, with everything that does not fit, before anything changes."""
        load_averages(self._averages, sd)

    def full_state_dict(self, fsdp_module: Any = None, key_style: str = "wrapped") -> dict[str, torch.Tensor]:
        """Returns whole float32 averages, fresh CPU tensors, on rank 0; {} elsewhere. Collective; live weights are not
        touched; one tensor at a time travels.

        ``key_style``: "wrapped": as upstream's files (``model._fsdp_wrapped_module.blocks.0...``); "clean": the
        unwrapped model's.
        """
        style = self._averages.ranks.agree(
            "full_state_dict()", lambda: one_of("key_style", key_style, ("wrapped", "clean"))
        )
        full = self.ema.full_state_dict(complete=False)
        return full if style == "clean" else {self._names[name]: tensor for name, tensor in full.items()}

    def save(self, path: str | Path) -> None:
        """Writes a resumable checkpoint, every rank its own bytes; see shardow.EMA.save(). Collective."""
        self.ema.save(path)

    def load(self, path: str | Path) -> None:
        """Loads what save() wrote, with its decay and step, at any world size and sharding. Collective."""
        self.ema.load(path)

    # ---- the averages in a model

    @torch.no_grad()
    def copy_to(self, fsdp_module: Any) -> None:
        """Copies the averages, cast, into the parameters of a module with the same names. In the live one each rank
        writes its own part; another, sharded or not, gets tensor after tensor. Collective.

        Raises ValueError and KeyError, before anything changes, where a name is on one side only or a shape differs.
        """
        model = model_and_root(fsdp_module)[0]
        if model is self._model:
            self.ema.feed_back()
            return

        def refuse_unlike() -> None:
            averages = {row.name: tuple(row.local.region.shape) for row in self._averages.tracked}
            weights = {local.name: tuple(local.region.shape) for local in find(model, odd=True).parameters}
            fit = compare(averages, weights)
            fit.refuse("copy_to()", "the module", KeyError, target="in the averages", done="nothing was copied")

        self._averages.ranks.agree("copy_to()", refuse_unlike)
        copies.copy_to(self._averages, model, None, complete=False)

    def swapped(self) -> AbstractContextManager[None]:
        """Swaps the averages in: in ``with ema.swapped():`` the live module holds them; afterwards its weights, bit for
        bit. Collective."""
        return self.ema.swapped()


class Shadow(dict[str, torch.Tensor]):
    """Dict that ``shadow`` gives: entries are the averages' memory, and can't be exchanged. It is pickled as a dict."""

    def __setitem__(self, name: str, value: torch.Tensor) -> NoReturn:
        way_out = f"write shadow[{name!r}].copy_(...), or assign the whole: shadow = {{...}}"
        raise invalid(f"shadow[{name!r}] = ... would change a dict and no average; {way_out}", TypeError)

    def __reduce__(self) -> Any:
        return dict, (dict(self),)


def fsdp_state_dict(model: nn.Module) -> dict[str, torch.Tensor]:
    """Returns whole CPU tensors of the live model, parameters and persistent buffers, under clean names, on rank 0; {}
    elsewhere. Collective."""
    return full_state_dict(model)


# ---- model.pt: ``{"generator_ema": {key: tensor}, "generator": ...}`` by torch.save()


def write_model_pt(
    path: str | Path, ema: EMA_FSDP | None = None, key_style: str = "wrapped", **models: nn.Module
) -> None:
    """Writes ``ema`` as "generator_ema", and live models by name (``generator=``, ``critic=``), from rank 0, to which
    they are gathered. Collective.

    The file that was at ``path`` stays until the new one is whole. For a model that does not fit one host:
    EMA_FSDP.save(), shardow.save().

    Args:
        key_style: of the averages: "wrapped", which upstream's readers look for, or "clean".

    Raises:
        OSError, on every rank: rank 0 could not write.
    """
    if ema is None and not models:
        raise invalid("write_model_pt(): nothing to write; give ema=, generator= or other models")
    content = {} if ema is None else {"generator_ema": ema.full_state_dict(key_style=key_style)}
    content.update({name: full_state_dict(model_and_root(model)[0]) for name, model in models.items()})
    ranks = ranks_of(model_and_root(next(iter(models.values())))[0]) if ema is None else model_averages(ema.ema).ranks
    ranks.agree("write_model_pt()", lambda: files.write(content, path) if ranks.rank == 0 else None)


def read_model_pt(path: str | Path, entry: str = "generator_ema") -> dict[str, torch.Tensor]:
    """Returns one entry's tensors, mapped from the file, without wrappers in their keys. Raises KeyError where there is
    no such entry."""
    content = foreign.loaded(path)
    if not isinstance(content, Mapping) or not isinstance(content.get(entry), Mapping):
        names = ", ".join(map(repr, content)) if isinstance(content, Mapping) else type(content).__name__
        raise errors.make("not_found", f"{path} has no {entry!r}; it has {names[:400]}")
    tensors: dict[str, torch.Tensor] = {}
    for key, tensor in content[entry].items():
        if (name := without_wrappers(key)) in tensors:
            raise errors.make("corrupt", f"{path} has '{name}' twice in {entry!r}, once as '{key}'")
        tensors[name] = tensor
    return tensors


@torch.no_grad()
def load_model_pt(target: EMA_FSDP | nn.Module | Any, path: str | Path, entry: str = "generator_ema") -> None:
    """Loads one entry into averages, or into a model, sharded or not, also one on meta; each rank reads its own slices.
    Collective.

    Buffers of the model that the entry lacks keep their values. Raises, on every rank and before anything changes,
    where other names or shapes differ.
    """
    model = target._model if isinstance(target, EMA_FSDP) else model_and_root(target)[0]
    tensors = ranks_of(model).agree("load_model_pt()", lambda: read_model_pt(path, entry))
    if isinstance(target, EMA_FSDP):
        target.load_state_dict(tensors)
    else:
        kept = {
            slot.name: slot.recorded
            for slot in slots(model, "buffer")  # averages are of parameters alone
            if not slot.recorded.is_meta and not hasattr(slot.recorded, "_local_tensor")
        }
        materialize(model, {**kept, **tensors})


# ---- how the trainers start and wrap: FSDP1 with their options

_STRATEGIES = {
    "full": ShardingStrategy.FULL_SHARD,
    "hybrid_full": ShardingStrategy.HYBRID_SHARD,
    "hybrid_zero2": ShardingStrategy._HYBRID_SHARD_ZERO2,
    "no_shard": ShardingStrategy.NO_SHARD,
}
_BF16 = MixedPrecision(
    param_dtype=torch.bfloat16, reduce_dtype=torch.float32, buffer_dtype=torch.float32, cast_forward_inputs=False
)


def fsdp_wrap(
    module: nn.Module, sharding_strategy: str = "full", mixed_precision: bool = False, wrap_strategy: str = "size",
    min_num_params: int = int(5e7), transformer_module: type[nn.Module] | Iterable[type[nn.Module]] | None = None,
    cpu_offload: bool = False, **options: Any,
) -> FullyShardedDataParallel:  # fmt: skip
    """Wraps ``module`` in FSDP1; every parameter keeps its name and its own requires_grad.

    Args:
        sharding_strategy: "full", "hybrid_full", "hybrid_zero2" or "no_shard".
        mixed_precision: computes in bfloat16, reduces in float32.
        wrap_strategy: "size": units of at least ``min_num_params`` parameters; "transformer": units that are a
            ``transformer_module``.
        options: further ones of FullyShardedDataParallel, e.g. ``device_mesh`` for "hybrid_full" on a CPU; they come
            before those above.

    Raises:
        KeyError, ValueError: no such strategy, or no ``transformer_module`` where one is needed.
    """
    if sharding_strategy not in _STRATEGIES:
        raise invalid(
            f"sharding_strategy={sharding_strategy!r}; there are {', '.join(map(repr, _STRATEGIES))}", KeyError
        )
    policy = _policy(wrap_strategy, min_num_params, transformer_module)
    os.environ.setdefault("NCCL_CROSS_NIC", "1")
    device = torch.cuda.current_device() if torch.cuda.is_available() else torch.device("cpu")
    chosen: dict[str, Any] = {
        "auto_wrap_policy": policy,
        "sharding_strategy": _STRATEGIES[sharding_strategy],
        "mixed_precision": _BF16 if mixed_precision else None,
        "device_id": device,
        "use_orig_params": True,
        "cpu_offload": CPUOffload(offload_params=cpu_offload),
    }
    return FullyShardedDataParallel(module, **{**chosen, **options})


def _policy(wrap_strategy: str, min_num_params: int, transformer_module: Any) -> Any:
    if wrap_strategy == "size":
        return partial(size_based_auto_wrap_policy, min_num_params=min_num_params)
    if wrap_strategy != "transformer":
        raise invalid(f"wrap_strategy={wrap_strategy!r}; it must be 'size' or 'transformer'")
    if not transformer_module:
        raise invalid("wrap_strategy='transformer' needs transformer_module=, the class of the blocks, or several")
    classes = {transformer_module} if isinstance(transformer_module, type) else set(transformer_module)
    return partial(transformer_auto_wrap_policy, transformer_layer_cls=classes)


def barrier() -> None:
    """Waits for all ranks, where there are several."""
    if dist.is_initialized():
        dist.barrier()


def launch_distributed_job(backend: str = "nccl") -> None:
    """Makes the process group that torchrun's variables describe, and sets this process's CUDA device where there are
    any."""
    dist.init_process_group(backend, timeout=timedelta(minutes=30))
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))


__all__ = [
    "EMA_FSDP", "barrier", "fsdp_state_dict", "fsdp_wrap", "launch_distributed_job", "load_model_pt", "read_model_pt",
    "write_model_pt",
]  # fmt: skip
