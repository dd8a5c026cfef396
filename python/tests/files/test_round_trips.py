"""Every sharding writes the bytes of the plain file, and loads every other's file to the last bit.

So do weights of 16, 32 and 64 bits, integers, bools and fp8, buffers and ties.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import ranks
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import shardow

State = nn.Module | dict[str, torch.Tensor]


class Everything(nn.Module):
    """Sizes that two tensor parallel ranks divide, and that leave 2 to 4 shards uneven: 10 and 5 rows; or empty: 1
    row."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(10, 4)
        self.up = nn.Linear(4, 10)
        self.norm = nn.BatchNorm1d(10)
        self.down = nn.Linear(10, 1)
        self.bf16 = nn.Linear(4, 5).bfloat16()
        self.f16 = nn.Linear(6, 1).half()
        self.head = nn.Linear(4, 10, bias=False)
        self.head.weight = self.embed.weight
        for name, shape, dtype in (
            ("table", (3, 5), torch.float32), ("coarse", (7,), torch.bfloat16), ("fine", (2, 2), torch.float64),
            ("counted", (3,), torch.int64), ("steps", (5,), torch.int32), ("mask", (9,), torch.bool),
            ("scale", (), torch.float32), ("seen", (), torch.int64), ("nothing", (0, 3), torch.float32),
        ):  # fmt: skip
            self.register_buffer(name, torch.zeros(shape, dtype=dtype))
        self.register_buffer("scratch", torch.zeros(4), persistent=False)


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def from_bits(values: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    return (values % 2 if like.dtype is torch.bool else values).view(like.dtype).view(like.shape)


def any_bits(like: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Not only numbers: infinities, NaNs with payloads, subnormals, -0."""
    return from_bits(torch.randint(0, 256, (like.nbytes,), generator=generator, dtype=torch.uint8), like)


def module() -> Everything:
    generator, model = torch.Generator().manual_seed(0), Everything()
    with torch.no_grad():
        for tensor in [*model.parameters(), *model.buffers()]:
            tensor.copy_(any_bits(tensor, generator))
    return model


def mapping() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    fp8 = (torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz, torch.float8_e8m0fnu)
    likes = {
        f"{str(dtype).removeprefix('torch.')}.{rows}": torch.empty(rows, 5, dtype=dtype)
        for dtype in fp8
        for rows in (1, 7)
    } | {
        "flat": torch.empty(11, dtype=torch.float8_e4m3fn),
        "f32": torch.empty(3, 10),
        "bf16": torch.empty(10, 3, dtype=torch.bfloat16),
        "f16": torch.empty(5, 4, 3, dtype=torch.float16),
        "complex": torch.empty(4, 3, dtype=torch.complex64),
        "mask": torch.empty(3, 5, dtype=torch.bool),
        "scalar": torch.empty(()),
        "nothing": torch.empty(0, 3, dtype=torch.float8_e5m2),
        "transposed": torch.empty(7, 4),
        "transposed.fp8": torch.empty(3, 5, dtype=torch.float8_e4m3fn),
    }
    return {name: any_bits(like, generator) for name, like in likes.items()}


def shard_units(model: Everything, apply: Callable[[nn.Module], nn.Module]) -> nn.Module:
    """One unit for each dtype, and ties inside one."""
    for name in ("up", "bf16", "f16"):
        setattr(model, name, apply(getattr(model, name)))
    return apply(model)


def fsdp1(model: Everything) -> nn.Module:
    return shard_units(
        model, lambda unit: FullyShardedDataParallel(unit, device_id=torch.device("cpu"), use_orig_params=True)
    )


def fsdp2(model: Everything) -> nn.Module:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return shard_units(model, lambda unit: fully_shard(unit, mesh=mesh))


def fsdp2_by_columns(model: Everything) -> nn.Module:
    """Torch refuses this where the columns don't divide by the ranks."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return shard_units(
        model, lambda unit: fully_shard(unit, mesh=mesh, shard_placement_fn=lambda p: Shard(min(p.dim() - 1, 1)))
    )


def hsdp(model: Everything) -> nn.Module:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    return shard_units(model, lambda unit: fully_shard(unit, mesh=mesh))


def tp_fsdp2(model: Everything) -> nn.Module:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    plan = {
        "embed": RowwiseParallel(input_layouts=Replicate()), "head": ColwiseParallel(), "up": ColwiseParallel(),
        "down": RowwiseParallel(),
    }  # fmt: skip
    parallelize_module(model, mesh["tp"], plan)
    model.head.weight = model.embed.weight  # it makes new parameters
    return shard_units(model, lambda unit: fully_shard(unit, mesh=mesh["dp"]))


def columns(model: Everything) -> nn.Module:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    sharded = {p: nn.Parameter(cut(p.detach(), mesh, [Shard(1)])) for p in model.parameters()}
    for child in model.modules():
        for name, p in child._parameters.items():
            child._parameters[name] = None if p is None else sharded[p]
    return model


def cut(tensor: torch.Tensor, mesh: DeviceMesh, placements: list[Placement]) -> DTensor:
    """Without communication, which does not know fp8. Vectors are cut along the dimension that they have."""
    placements = [Shard(min(one.dim, tensor.dim() - 1)) if isinstance(one, Shard) else one for one in placements]
    return distribute_tensor(tensor, mesh, placements, src_data_rank=None)


def in_pieces(
    shape: tuple[int, ...], *placements: Placement
) -> Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]:
    """Scalars stay plain tensors. What is called transposed is cut as the transpose, so that every rank holds it with
    strides.
    """

    def apply(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        mesh = init_device_mesh("cpu", shape)
        return {
            name: tensor if not tensor.dim()
            else cut(tensor.t().contiguous(), mesh, list(placements)).t() if name.startswith("transposed")
            else cut(tensor, mesh, list(placements))
            for name, tensor in state.items()
        }  # fmt: skip

    return apply


def with_strides(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {
        name: tensor.t().contiguous().t() if name.startswith("transposed") else tensor for name, tensor in state.items()
    }


#: {kind: (ranks, how a whole state is shared among them)}
MODULES: dict[str, tuple[int, Callable[[Everything], nn.Module]]] = {
    "plain": (1, lambda model: model),
    "ddp": (2, DistributedDataParallel),
    "fsdp1": (2, fsdp1),
    "fsdp2-1": (1, fsdp2),
    "fsdp2-2": (2, fsdp2),
    "fsdp2-3": (3, fsdp2),
    "fsdp2-4": (4, fsdp2),
    "hsdp": (4, hsdp),
    "tp+fsdp2": (4, tp_fsdp2),
    "columns-2": (2, columns),
    "columns-3": (3, columns),
    "fsdp2-columns-2": (2, fsdp2_by_columns),
}
MAPPINGS: dict[str, tuple[int, Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]]] = {
    "plain": (1, with_strides),
    "rows-2": (2, in_pieces((2,), Shard(0))),
    "rows-3": (3, in_pieces((3,), Shard(0))),
    "rows-4": (4, in_pieces((4,), Shard(0))),
    "columns-2": (2, in_pieces((2,), Shard(1))),
    "columns-3": (3, in_pieces((3,), Shard(1))),
    "copies+rows": (4, in_pieces((2, 2), Replicate(), Shard(0))),
    "rows+columns": (4, in_pieces((2, 2), Shard(0), Shard(1))),
}
CASES = [("module", kind) for kind in MODULES] + [("mapping", kind) for kind in MAPPINGS]


def whole(what: str) -> State:
    return module() if what == "module" else mapping()


def build(what: str, kind: str) -> State:
    return MODULES[kind][1](module()) if what == "module" else MAPPINGS[kind][1](mapping())


def world_of(what: str, kind: str) -> int:
    return MODULES[kind][0] if what == "module" else MAPPINGS[kind][0]


def held(state: State, every_name: bool) -> Iterator[tuple[str, torch.Tensor]]:
    """(name, what this rank holds of the tensor), a tied one once or under every name."""
    if isinstance(state, nn.Module):
        named = [
            *state.named_parameters(remove_duplicate=not every_name),
            *state.named_buffers(remove_duplicate=not every_name),
        ]
    else:
        named = list(state.items())
    for name, tensor in named:
        yield name, getattr(tensor, "_local_tensor", tensor)


@torch.no_grad()
def spoil(state: State, expected: dict[str, torch.Tensor]) -> None:
    """Every bit becomes the wrong one, so that nothing is right by chance."""
    for name, tensor in held(state, every_name=False):
        tensor.copy_(from_bits(bits(expected[name]) ^ (1 if tensor.dtype is torch.bool else 255), tensor))


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return (a.dtype, a.shape) == (b.dtype, b.shape) and bits(a).equal(bits(b))


def is_tied(model: nn.Module) -> bool:
    parameters = list(model.named_parameters(remove_duplicate=False))
    embed, head = (
        next(p for name, p in parameters if name.endswith(suffix)) for suffix in ("embed.weight", "head.weight")
    )
    return embed is head


def save(what: str, kind: str, path: str) -> None:
    shardow.save(build(what, kind), path)


def load_all(what: str, kind: str, paths: list[str]) -> list[str]:
    """What is wrong on this rank.

    Torch cuts the expected state the same way; of that, a file lacks only the buffer that is not persistent.
    """
    expected, state = dict(held(build(what, kind), every_name=True)), build(what, kind)
    wrong = []
    for path in paths:
        spoil(state, expected)
        report = shardow.load(state, path)
        found = {"missing": report["missing"], "unexpected": report["unexpected"]}
        found["wrong"] = [name for name, tensor in held(state, every_name=True) if not same(tensor, expected[name])]
        found["wrong"] = [name for name in found["wrong"] if not name.endswith("scratch")]
        if any(found.values()) or (isinstance(state, nn.Module) and not is_tied(state)):
            wrong.append(f"{Path(path).name}: {found}")
    return wrong


@pytest.fixture(scope="module")
def file_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str | None], Path]:
    """The file of a kind's state, saved once by its ranks; of None: saved by this process, which has no others."""
    folder = tmp_path_factory.mktemp("round_trips")

    @functools.cache
    def written(what: str, kind: str | None) -> Path:
        path = folder / f"{what}-{kind}.safetensors"
        if kind is None:
            shardow.save(whole(what), path)
        else:
            ranks.run(world_of(what, kind), save, what, kind, str(path))
        return path

    return written


@pytest.mark.parametrize(("what", "kind"), CASES)
def test_every_sharding_writes_the_bytes_of_the_plain_file(
    what: str, kind: str, file_of: Callable[[str, str | None], Path]
) -> None:
    assert file_of(what, kind).read_bytes() == file_of(what, None).read_bytes()


@pytest.mark.parametrize(("what", "kind"), CASES)
def test_every_sharding_loads_every_others_file_bit_for_bit(
    what: str, kind: str, file_of: Callable[[str, str | None], Path]
) -> None:
    paths = [str(file_of(what, other)) for case, other in CASES if case == what]
    assert ranks.run(world_of(what, kind), load_all, what, kind, paths) == [[]] * world_of(what, kind)


@pytest.mark.parametrize("what", ["module", "mapping"])
def test_the_reference_reader_finds_every_bit(what: str, file_of: Callable[[str, str | None], Path]) -> None:
    """No error of ours is its own inverse."""
    found, state = load_file(file_of(what, None)), whole(what)
    expected = dict(state.state_dict()) if isinstance(state, nn.Module) else dict(state)
    expected.pop("head.weight", None)  # tied: stored once, under its first name
    assert set(found) == set(expected)
    assert [name for name in found if not same(found[name], expected[name])] == []
