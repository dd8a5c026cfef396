"""plan(): bytes on the fullest rank before anything is built. They come from shapes, a step of the optimizer on meta,
and a forward pass that allocates nothing."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import TorchDispatchMode

from shardow import _core
from shardow.base.checks import instance, invalid, one_of, unsupported, whole
from shardow.errors import UnknownOptionError
from shardow.memory.activations import Fake, shape_and_dtype, storage_bytes, tensors_in
from shardow.memory.switches import apply, is_switched
from shardow.sharding.dtypes import device_of
from shardow.sharding.modules import repeated_blocks
from shardow.sharding.names import unwrapped
from shardow.sharding.slots import by_tensor, slots

_OFF: dict[str, Any] = {"bf16": False, "activation_checkpointing": False, "attention_weights": True}
_ON: dict[str, Any] = {"bf16": True, "activation_checkpointing": True, "attention_weights": False}


class Usage(dict[str, Any]):
    """Bytes on one rank; printed as a table in MiB.

    weights: parameters and buffers; gradients; optimizer: its state; averages; activations: what autograd keeps at the
    end of a forward pass in training, or None where there was no batch to tell; total: the sum of those that are known.

    plan() adds saves: {switch: bytes of activations that it takes away}, with the other switches as they were given;
    None where there is no batch, or no repeated block to checkpoint. measure() adds device_peak on CUDA: the most that
    torch had allocated there since its count was last reset.
    """

    def __str__(self) -> str:
        rows = [(key, amount) for key, amount in self.items() if key != "saves"]
        rows += [(f"saved by {name}", amount) for name, amount in self.get("saves", {}).items() if amount is not None]
        width = max(len(name) for name, _ in rows)
        return "\n".join(f"{name:<{width}}  {_mebibytes(amount)}" for name, amount in rows)


def usage(**amounts: int | None) -> Usage:
    """Of the five keys in their order, with their total."""
    return Usage(amounts, total=sum(amount for amount in amounts.values() if amount is not None))


def _mebibytes(amount: int | None) -> str:
    return f"{amount / 2**20:>12,.2f} MiB" if amount is not None else f"{'unknown':>12}"


@dataclass(frozen=True)
class Layout:
    """``shards`` ranks hold different parts of a tensor, ``replicas`` the same. ``flat``: parts are stretches of
    elements (FSDP1), else of rows."""

    shards: int
    replicas: int
    flat: bool = False

    def part(self, tensor: torch.Tensor) -> torch.Tensor:
        """Returns the largest part, on meta, which is also what FSDP2 gives memory to on every rank: its smaller parts
        are padded.
        """
        shape = list(tensor.shape)
        if self.shards > 1 and shape:
            shape = [tensor.numel()] if self.flat else shape
            shape[0] = -(-shape[0] // self.shards)
        return torch.empty(shape, dtype=tensor.dtype, device="meta")

    def averaged(self, tensor: torch.Tensor) -> int:
        """Elements of which this rank keeps the average: replicas divide what they hold, as ``EMA(replicas="split")``
        does.
        """
        return _core.Region.whole(list(self.part(tensor).shape)).part(0, self.replicas).size


def layout_of(sharding: str, ranks: Any, shards: Any) -> Layout:
    one_of("sharding", sharding, ("plain", "ddp", "fsdp1", "fsdp2", "hsdp"))
    ranks = whole("ranks", ranks, 1)
    if sharding != "hsdp":
        if shards is not None:
            raise invalid(f"shards={shards!r} is for sharding='hsdp'; with {sharding!r} it follows from ranks")
        return Layout(1, ranks) if sharding in ("plain", "ddp") else Layout(ranks, 1, flat=sharding == "fsdp1")
    if shards is None or ranks % (shards := whole("shards", shards, 1)):
        wanted = f"how many of them share one copy of the model: a divisor of {ranks}, not {shards!r}"
        raise invalid(f"sharding='hsdp' on {ranks} ranks needs shards=, {wanted}")
    return Layout(shards, ranks // shards)


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

    Weights, gradients, optimizer, averages, activations, and their total. Local; allocates nothing, and leaves the
    model alone.

        print(shardow.memory.plan(model, ranks=8, batch=(32, 3, 64, 64), switches={"bf16": True}))

    Not in it: temporary buffers of operations and collectives, what allocators waste, libraries' workspaces.

    Args:
        model_or_shapes: the model before it is sharded, with values or on meta; or {name: shape}, {name: (shape,
            dtype)}, {name: tensor}, all trainable but integers. Frozen parameters have neither gradients nor optimizer
            state nor averages.
        ranks: that train together.
        sharding: "plain", "ddp", "fsdp1", "fsdp2" (every parameter sharded along its rows), or "hsdp" with ``shards``.
        optimizer: "adamw", "sgd", "sgd-momentum" or another of torch.optim's names, a class, an instance (its groups
            and their options count), or None. Its state is that of a step on meta.
        batch: one rank's: a tensor or its shape, or (shape, dtype); a tuple of such, as forward() takes them; or a dict
            by the names of forward()'s arguments. Only shapes count. None: activations are not known, and are None in
            the result; so they are with shapes in place of a model.
        switches: what ``apply(model, **switches)`` will be given, with its defaults for what is not said; None: no
            switch is on.
        shards: under "hsdp", ranks that share one copy of the model.
        averages: how many (one for each decay), float32, divided among all ranks as EMA does: a plain model's need
            ``EMA(..., group=)`` for that.
        loss: of the model's output, where that is not the loss; what it keeps is counted too.
        device: whose kernels are planned for; None: the model's, or if that is on meta the accelerator, or the CPU.

    Returns:
        A dict that prints as a table; with "saves", what each switch takes away from the activations.

    Raises:
        ValueError: options or shapes that make no sense, a model that is sharded already, a batch that the model
            refuses.
        NotImplementedError: a forward pass that depends on values, nn.LSTM with a batch, an optimizer that can't step
            on meta.
    """
    layout = layout_of(sharding, ranks, shards)
    averages = whole("averages", averages)
    wanted = _wanted(switches)
    model = _plain(model_or_shapes) if isinstance(model_or_shapes, nn.Module) else None
    if model is None:
        tensors = list(_of_shapes(model_or_shapes))
    else:  # tied tensors once
        tensors = [(where[0].recorded, where[0].kind != "parameter") for where in by_tensor(slots(model)).values()]
    activations, saves = None, dict.fromkeys(_OFF)
    if model is not None and batch is not None:
        activations, saves = _activations(Fake(model, batch, loss, _device(model, device)), wanted)
    elif batch is not None:
        raise invalid("plan(): shapes alone can't be run with a batch; give the module, on meta for example")
    trained = [tensor for tensor, is_buffer in tensors if tensor.requires_grad and not is_buffer]
    parts = {id(tensor): nn.Parameter(layout.part(tensor)) for tensor in trained}
    gradients = sum(part.nbytes for part in parts.values())
    others = [(tensor, is_buffer) for tensor, is_buffer in tensors if id(tensor) not in parts]
    held = usage(
        # Buffers are whole on every rank.
        weights=gradients + sum((tensor if is_buffer else layout.part(tensor)).nbytes for tensor, is_buffer in others),
        gradients=gradients,
        optimizer=state_bytes(optimizer, parts, by_group=model is not None),
        averages=averages * torch.float32.itemsize * sum(layout.averaged(tensor) for tensor in trained),
        activations=activations,
    )
    return Usage(held, saves=saves)


def _activations(fake: Fake, wanted: dict[str, Any]) -> tuple[int, dict[str, int | None]]:
    """(bytes, what each switch saves): every switch is turned over by itself."""

    def kept(switches: dict[str, Any]) -> int:
        with apply(fake.model, **switches):
            return fake.kept()

    now = kept(wanted)
    saves: dict[str, int | None] = {}
    for name, off in _OFF.items():
        is_off = wanted[name] is off
        if is_off and name == "activation_checkpointing" and not repeated_blocks(fake.model):
            saves[name] = None
            continue
        other = kept({**wanted, name: _ON[name] if is_off else off})
        saves[name] = now - other if is_off else other - now
    return now, saves


def _wanted(switches: Mapping[str, Any] | None) -> dict[str, Any]:
    """What is on; memory.apply()'s own defaults for what is not said."""
    if switches is None:
        return _OFF
    if unknown := set(instance("switches", switches, Mapping)) - set(_OFF):
        raise UnknownOptionError(
            f"switches: memory.apply() takes {', '.join(_OFF)}, not {', '.join(sorted(map(str, unknown)))}"
        )
    wanted = {**_ON, **switches}
    return {**wanted, "bf16": bool(wanted["bf16"]), "attention_weights": bool(wanted["attention_weights"])}


def _plain(model: nn.Module) -> nn.Module:
    """Without DDP and torch.compile around it; a sharded one is refused, since its shapes are those of shards."""
    by_fsdp1 = any(isinstance(module, FullyShardedDataParallel) for module in model.modules())
    if by_fsdp1 or any(isinstance(p, DTensor) for p in model.parameters()):
        raise invalid("plan() wants the model before it is sharded, as on meta; measure() the sharded one")
    model = unwrapped(model)
    if lazy := [name for name, p in model.named_parameters() if is_lazy(p)]:
        raise invalid(f"plan(): not initialised yet, and so without shapes: {', '.join(lazy[:8])}")
    if any(is_switched(module) for module in model.modules()):
        raise invalid("plan(): memory.apply() is on this model; remove() it, and say with switches= what is to be on")
    return model


def _of_shapes(shapes: Any) -> Iterator[tuple[torch.Tensor, bool]]:
    """Yields (tensor on meta, whether it is a buffer) of {name: shape}, {name: (shape, dtype)} or {name: tensor};
    integers are taken for buffers."""
    if not isinstance(shapes, Mapping):
        raise invalid(f"plan() takes a module or a mapping of names to shapes, not a {type(shapes).__name__}")
    for name, value in shapes.items():
        form = (tuple(value.shape), value.dtype) if isinstance(value, torch.Tensor) else shape_and_dtype(value)
        if form is None:
            raise invalid(f"plan(): '{name}': {value!r} is no shape; give numbers, as (8, 16) or ((8, 16), 'bfloat16')")
        shape, dtype = form
        trainable = dtype.is_floating_point or dtype.is_complex
        yield torch.empty(shape, dtype=dtype, device="meta", requires_grad=trainable), not trainable


def _device(model: nn.Module, device: Any) -> torch.device:
    """Whose kernels are planned for: what was said, or where the model is, or what is there."""
    there = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if device is not None:
        chosen = device_of(device)
        if chosen.type not in ("cpu", there.type if there else "cpu"):
            way_out = f"leave it out to plan for {there or 'the CPU'}"
            raise unsupported(f"device={str(device)!r}: torch can't follow its kernels where there is none; {way_out}")
        return chosen
    found = next((tensor.device for tensor in model.parameters() if not tensor.is_meta), None)
    return found or there or torch.device("cpu")


#: They choose kernels that meta does not have, and no state.
_WAYS = {"fused": False, "foreach": None, "capturable": False, "differentiable": False}


class _Ones(TorchDispatchMode):
    """Numbers that an optimizer reads from tensors on meta, as Adafactor does, are 1: the size of its state does not
    hang on them.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default and args[0].is_meta:
            return 1.0
        return func(*args, **(kwargs or {}))


Parts = Mapping[Any, torch.nn.Parameter]


def state_bytes(optimizer: Any, parts: Parts, by_group: bool) -> int:
    """``optimizer``: a name, a class, an instance, or None. ``parts``: what a rank holds of each trainable parameter,
    on meta, by the parameter's id. ``by_group``: an instance has these parameters in its groups."""
    if optimizer is None or not parts:
        return 0
    cls, groups, options = _recipe(optimizer, parts, by_group)
    options = {**options, **{name: value for name, value in _WAYS.items() if name in inspect.signature(cls).parameters}}
    for part in parts.values():
        part.grad = torch.empty_like(part)
    try:
        with _Ones():  # type: ignore[no-untyped-call]
            twin = cls(groups, **options)
            twin.step()
    except Exception as error:
        failed = f"a step on meta failed with {type(error).__name__}: {error}"
        raise unsupported(f"plan(): the state of {cls.__name__} is not known: {failed}; give an instance") from error
    return storage_bytes(tensors_in(list(twin.state.values())))


def _recipe(
    optimizer: Any, parts: Parts, by_group: bool
) -> tuple[type[torch.optim.Optimizer], list[dict[str, Any]], dict[str, Any]]:
    """Class, groups and options."""
    one_group: list[dict[str, Any]] = [{"params": list(parts.values())}]
    if isinstance(optimizer, str):
        base = torch.optim.Optimizer
        classes = [cls for cls in vars(torch.optim).values() if isinstance(cls, type) and issubclass(cls, base)]
        by_name = {cls.__name__.lower(): cls for cls in classes if cls is not base} | {"sgd-momentum": torch.optim.SGD}
        if optimizer.lower() not in by_name:
            names = ", ".join(sorted(by_name))
            raise invalid(f"optimizer={optimizer!r}; names are {names}; others are a class, an instance or None")
        return by_name[optimizer.lower()], one_group, {"momentum": 0.9} if optimizer.lower() == "sgd-momentum" else {}
    if isinstance(optimizer, type) and issubclass(optimizer, torch.optim.Optimizer):
        return optimizer, one_group, {}
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise invalid(f"optimizer is a {type(optimizer).__name__}; give a name, a class, an instance, or None")
    known = inspect.signature(type(optimizer)).parameters
    options = {name: value for name, value in optimizer.defaults.items() if name in known}
    # Shapes alone do not tell which parameter is in which group.
    return type(optimizer), _groups(optimizer, parts) if by_group else one_group, options


def _groups(optimizer: torch.optim.Optimizer, parts: Parts) -> list[dict[str, Any]]:
    """Each group with the options that it has; what is in no group has no state."""
    groups = []
    for group in optimizer.param_groups:
        held = [parts[id(p)] for p in group["params"] if id(p) in parts]
        if held:
            groups.append(
                {**{key: value for key, value in group.items() if key != "param_names"}, **_WAYS, "params": held}
            )
    if not groups:
        raise invalid(f"the {type(optimizer).__name__} has other parameters than the model's; give its class")
    return groups
