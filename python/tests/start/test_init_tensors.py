"""Tensors of any dtype, and tied ones, as materialize() fills them."""

from __future__ import annotations

from pathlib import Path
from unittest import mock

import pytest
import ranks
import torch
import torch.distributed as dist
from nets import Block, fsdp2, net, only_rank0, same, same_bits, whole
from outcomes import outcome
from safetensors.torch import save_file
from test_init_models import BF16, F16, F32, F64
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import shardow
from shardow.distributed import stream

CASTS = [(a, b) for a in (F16, BF16, F32, F64) for b in (F16, BF16, F32, F64)]


class Odd(nn.Module):
    """A scalar, nothing at all, and one element more than two ranks share evenly."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight, self.nothing = (
            nn.Parameter(torch.zeros(65, 3, dtype=dtype)),
            nn.Parameter(torch.zeros(0, 3, dtype=dtype)),
        )
        self.register_buffer("scalar", torch.tensor(0.0, dtype=dtype))
        self.register_buffer("count", torch.tensor(0))
        self.register_buffer("none", torch.zeros(0, 2, dtype=torch.int64))
        self.register_buffer("flags", torch.zeros(5, dtype=torch.bool))


def odd_state(dtype: torch.dtype) -> dict[str, torch.Tensor]:
    torch.manual_seed(3)
    weight = torch.cat(
        [
            torch.randn(62, 3, dtype=F64),
            torch.tensor([[0.0, -0.0, torch.inf], [1e-42, 1 + 2**-8 + 2**-40, 7e4], [1 + 2**-11, 3e38, 6e-8]]),
        ]
    )
    return {
        "weight": weight.to(dtype), "nothing": torch.zeros(0, 3, dtype=dtype),
        "scalar": torch.tensor(1 / 3, dtype=F64).to(dtype), "count": torch.tensor(2**60 + 1),
        "none": torch.zeros(0, 2, dtype=torch.int64), "flags": torch.tensor([True, False, True, True, False]),
    }  # fmt: skip


def cast_alike(directory: str) -> list[str]:
    wrong = []
    for there, here in CASTS:
        state = odd_state(there)
        expected = {name: tensor.to(here) if tensor.is_floating_point() else tensor for name, tensor in state.items()}
        for how, source in (
            ("file", f"{directory}/{there}.safetensors"),
            ("mapping", state),
            ("rank 0", only_rank0(state)),
        ):
            with shardow.meta_init():
                model = Odd(here)
            fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
            shardow.materialize(model, source)
            found = whole(model)
            wrong += [
                f"{name} {how} {there} -> {here}" for name in expected if not same_bits(found[name], expected[name])
            ]
    for name, bad in (
        ("weight", torch.zeros(65, 3, dtype=torch.int64)),
        ("count", torch.tensor(1.0)),
        ("flags", torch.zeros(5)),
    ):
        for source in ({**odd_state(F32), name: bad}, only_rank0({**odd_state(F32), name: bad})):
            with shardow.meta_init():
                model = fully_shard(Odd(F32), mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
            with pytest.raises(
                ValueError,
                match=f"'{name}' is {bad.dtype} in the source and .* here, and only floating numbers are cast",
            ):
                shardow.materialize(model, source)
    return wrong


def test_floating_dtypes_are_cast_as_torch_does_and_others_are_exact(tmp_path: Path) -> None:
    for dtype in (F16, BF16, F32, F64):
        save_file(odd_state(dtype), tmp_path / f"{dtype}.safetensors")
    assert ranks.run(2, cast_alike, str(tmp_path)) == [[], []]


def bytes_from_rank_0(source: torch.dtype, own: torch.dtype) -> int:
    """In messages of a few elements each."""
    totals, state = [0], odd_state(source)
    with shardow.meta_init():
        model = fully_shard(Odd(own), mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    with mock.patch.object(stream, "_MESSAGE", 64):
        shardow.materialize(model, only_rank0(state), progress=lambda done, total: totals.append(total))
    assert same_bits(whole(model)["weight"], state["weight"].to(own))
    return totals[-1]


def test_of_source_and_model_the_narrower_dtype_travels() -> None:
    narrow = ranks.run(2, bytes_from_rank_0, BF16, BF16)[0]
    assert narrow > 0
    assert ranks.run(2, bytes_from_rank_0, F32, BF16)[0] == narrow
    assert ranks.run(2, bytes_from_rank_0, BF16, F32)[0] == narrow


class Shared(nn.Module):
    """Objects that are registered twice, not assigned from one module to another."""

    def __init__(self) -> None:
        super().__init__()
        weight, scale, table = nn.Parameter(torch.ones(3)), torch.ones(2), torch.ones(2)
        self.a, self.b = weight, weight
        self.register_buffer("scale", scale)
        self.register_buffer("scale_too", scale, persistent=False)
        self.register_buffer("table_too", table, persistent=False)
        self.register_buffer("table", table)

    def reset_parameters(self) -> None:
        nn.init.normal_(self.b)
        self.scale.fill_(5)


def test_what_is_registered_under_two_names_is_one_tensor_before_and_after() -> None:
    state = {"a": torch.tensor([1.0, 2, 3]), "scale": torch.full((2,), 4.0), "table": torch.full((2,), 6.0)}
    for source in (state, {**state, "b": state["a"]}, None):
        with shardow.meta_init():
            model = Shared()
        assert model.a.is_meta
        shardow.materialize(model, source)
        assert model.a is model.b
        assert model.scale is model.scale_too
        assert model.table is model.table_too
        wanted = state if source is not None else {"scale": torch.full((2,), 5.0), "table": torch.ones(2)}
        assert all(torch.equal(getattr(model, name), tensor) for name, tensor in wanted.items())


def test_an_initialisation_that_passes_a_tensor_over_is_an_error() -> None:
    with shardow.meta_init():
        model = nn.Sequential(nn.Linear(2, 3), Block())
    with pytest.raises(ValueError, match=r"1.calls got no values; give a function that sets them as source"):
        shardow.materialize(
            model,
            lambda module: [
                p.data.normal_() for p in [*module.parameters(False), *module.buffers(False)] if p.is_floating_point()
            ],
        )
    assert all(p.is_meta for p in model.parameters())
    with pytest.raises(ValueError, match=r"0.bias, 1.norm.weight, .* got no values"):
        shardow.materialize(model, lambda module: isinstance(module, nn.Linear) and module.weight.data.normal_())


def both_names(path: str) -> bool:
    state = net(3).state_dict()
    for model in (net(None), net(5)):
        fsdp2(model)
        report = shardow.load(model, path)
        assert report["unexpected"] == report["missing"] == []
        assert model.head.weight is model.embed.weight
        assert model.blocks[0].gain is model.blocks[0].scale
        assert same(whole(model), whole(fsdp2(net(3))))
    for source in (state, only_rank0(state), {f"module.{name}": tensor for name, tensor in state.items()}):
        model = fsdp2(net(None))
        shardow.materialize(model, source)
        assert same(whole(model), whole(fsdp2(net(3))))
    with pytest.raises(ValueError, match=r"unexpected in the file: .*other"):
        shardow.load(model, f"{path}.more.safetensors")
    assert shardow.load(model, f"{path}.more.safetensors", strict=False)["unexpected"] == ["other"]
    return True


def test_a_file_that_has_a_tied_tensor_under_all_its_names_fits(tmp_path: Path) -> None:
    state = {name: tensor.clone() for name, tensor in net(3).state_dict().items()}
    assert {"embed.weight", "head.weight", "blocks.0.down.weight", "blocks.0.gain"} <= set(state)
    save_file(state, tmp_path / "a.safetensors")
    save_file({**state, "other": torch.zeros(1)}, tmp_path / "a.safetensors.more.safetensors")
    assert ranks.run(2, both_names, str(tmp_path / "a.safetensors")) == [True, True]


def untied(directory: str) -> list[str]:
    """Returns the errors of sources whose embedding and head, tied in the model, differ in the last row alone."""
    state = {name: tensor.clone() for name, tensor in net(3).state_dict().items()}
    state["head.weight"][-1, -1] = -1.0
    messages = []
    for source in (f"{directory}/a.safetensors", shardow.merged([f"{directory}/a.safetensors"] * 2), only_rank0(state)):
        model = fsdp2(net(None))
        messages.append(outcome(lambda model=model, source=source: shardow.materialize(model, source))[1])
        assert all(param.is_meta for param in model.parameters())
    return messages


def test_a_source_with_different_tensors_under_the_names_of_a_tied_one_is_refused(tmp_path: Path) -> None:
    state = {name: tensor.clone() for name, tensor in net(3).state_dict().items()}
    state["head.weight"][-1, -1] = -1.0
    save_file(state, tmp_path / "a.safetensors")
    torch.save(state, tmp_path / "a.pt")
    merged = shardow.merged([tmp_path / "a.pt"])
    for fill in (
        lambda model: shardow.load(model, tmp_path / "a.safetensors"),
        lambda model: shardow.load(model, tmp_path / "a.safetensors", strict=False),
        lambda model: shardow.load(model, merged),
        lambda model: shardow.materialize(model, state),
    ):
        model = net(0)
        with pytest.raises(ValueError, match=r"'embed.weight' and 'head.weight' differ in the source"):
            fill(model)
        assert same(model.state_dict(), net(0).state_dict())
    for messages in zip(*ranks.run(2, untied, str(tmp_path)), strict=True):
        assert all("'embed.weight' and 'head.weight' differ" in text for text in messages), messages


class Ties(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(5, 3), nn.Linear(3, 5, bias=False)

    def tie_weights(self) -> None:
        self.head.weight = self.embed.weight


def test_a_model_ties_its_weights_when_they_have_values() -> None:
    with shardow.meta_init():
        model = Ties()
    values = torch.rand(5, 3)
    shardow.materialize(model, {"embed.weight": values, "head.weight": values})
    assert model.head.weight is model.embed.weight
    assert torch.equal(model.head.weight, values)
