"""compat.twinkle: the origin's verbs and helpers, and what they got wrong there."""

from __future__ import annotations

import os
from typing import Any

import pytest
import ranks
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard

from shardow.compat import twinkle

accelerate = pytest.importorskip("accelerate")


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 4)
        # Statistics are persistent buffers.
        self.layers = nn.ModuleList([nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)) for _ in range(2)])
        self.register_buffer("table", torch.arange(4.0), persistent=False)
        self.register_buffer("original", self.table, persistent=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(tokens) + self.table
        for layer in self.layers:
            hidden = layer(hidden)
        return hidden


class Model(nn.Module):
    """Decoder layers at model.layers, a tied head, a frozen bias."""

    def __init__(self) -> None:
        super().__init__()
        self.model = Inner()
        self.head = nn.Linear(4, 7)
        self.head.weight = self.model.embed.weight
        self.head.bias.requires_grad_(False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.head(self.model(tokens))
        return logits


def made(seed: int) -> Model:
    torch.manual_seed(seed)
    model = Model()
    for layer in model.model.layers:
        layer[1].running_mean.add_(seed)  # type: ignore[index, union-attr, operator]
    return model


def steps(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    found = []
    for step in range(5):
        loss = model(torch.arange(6) + step % 2).float().square().mean()
        found.append(loss.detach().clone())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return found


def wrapped(efficient: bool) -> bool:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("fsdp",))
    results = []
    for how in (False, efficient):
        model = made(1 if dist.get_rank() == 0 or not how else 5)
        trainable = [p for p in model.parameters() if p.requires_grad]
        optimizer = torch.optim.AdamW([{"params": trainable[:1], "lr": 0.1}, {"params": trainable[1:]}], lr=0.01)
        strategy = twinkle.NativeFSDPStrategy(mesh, "no", {"reshard_after_forward": False}, memory_efficient_init=how)
        assert strategy.wrap_model(model, optimizer) == (model, optimizer)
        assert strategy.unwrap_model(model) is model
        assert isinstance(model.model.layers[0], FSDPModule)
        assert model.model.table is model.model.original or torch.equal(model.model.table, model.model.original)
        assert not model.model.original.is_meta
        assert [len(group["params"]) for group in optimizer.param_groups] == [1, len(trainable) - 1]
        results.append([*steps(model, optimizer), *strategy.get_full_state_dict(model).values()])
        full = strategy.get_full_state_dict(model)
        assert set(full) == (set(model.state_dict()) if dist.get_rank() == 0 else set())
    return all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.parametrize("efficient", [True, False])
def test_training_after_wrap_model_is_that_of_a_model_which_every_rank_had(efficient: bool) -> None:
    assert ranks.run(2, wrapped, efficient) == [True, True]


def begun_empty() -> bool:
    """As twinkle's own models begin where use_rank0_pretrained_broadcast() says so."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("fsdp",))
    results = []
    for efficient in (False, True):
        strategy = twinkle.NativeFSDPStrategy(mesh, "no", memory_efficient_init=efficient)
        if strategy.use_rank0_pretrained_broadcast() and dist.get_rank():
            with accelerate.init_empty_weights(include_buffers=False):
                model = made(1)
            model.head.weight = model.model.embed.weight
            assert all(p.is_meta for p in model.parameters())
        else:
            model = made(1)
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01)
        strategy.wrap_model(model, optimizer)
        results.append([*steps(model, optimizer), *strategy.get_full_state_dict(model).values()])
    assert not twinkle.NativeFSDPStrategy(None, memory_efficient_init=True).use_rank0_pretrained_broadcast()
    return all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_ranks_that_are_told_so_build_the_model_without_weights_and_train_alike() -> None:
    assert ranks.run(2, begun_empty) == [True, True]


def helpers(_: object) -> bool:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    reference, model = made(1), made(1)
    full, tables = model.state_dict(), twinkle._get_non_persistent_buffers(model)
    assert set(tables) == {"model.table", "model.original"}
    model.to("meta")
    model.head.weight = model.model.embed.weight
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    model.model.table = model.model.original = None  # type: ignore[assignment]
    twinkle._restore_non_persistent_buffers(model, tables, "cpu")
    twinkle._broadcast_sharded_state_dict(model, full if dist.get_rank() == 0 else {}, device_type="cpu")
    losses, expected = (steps(each, torch.optim.AdamW(each.parameters(), lr=0.01)) for each in (model, reference))
    return all(torch.equal(a, b) for a, b in zip(losses, expected, strict=True))


def test_the_helpers_by_themselves() -> None:
    assert ranks.run(2, helpers, None) == [True, True]


def bound_again() -> None:
    model = made(0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    steps(model, optimizer)
    momenta = {name: optimizer.state[p]["exp_avg"].clone() for name, p in model.named_parameters() if p.requires_grad}
    unknown = nn.Parameter(torch.ones(2))
    some = torch.optim.SGD([{"params": [model.head.bias]}, {"params": [unknown]}], lr=1.0)
    strategy = twinkle.NativeFSDPStrategy(init_device_mesh("cpu", (2,), mesh_dim_names=("fsdp",)), "no")
    with pytest.raises(ValueError, match=r"group 1: parameter 0 .* it is not known where it was"):
        strategy.wrap_model(model, some)
    assert [group["params"][0] for group in some.param_groups] == [model.head.bias, unknown]
    strategy.wrap_model(model, optimizer)
    sharded = {name: optimizer.state[p]["exp_avg"] for name, p in model.named_parameters() if p.requires_grad}
    assert all(torch.equal(sharded[name].full_tensor(), momentum) for name, momentum in momenta.items())


def test_an_optimizer_is_bound_again_with_its_state_or_not_at_all() -> None:
    ranks.run(2, bound_again)


def test_variables_of_the_environment_come_back_when_the_last_block_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "false")
    monkeypatch.delenv("FSDP_CPU_RAM_EFFICIENT_LOADING", raising=False)
    before = dict(os.environ)
    with twinkle.fsdp_pretrained_load_context(False):
        assert dict(os.environ) == before
    first, second = twinkle.fsdp_pretrained_load_context(True), twinkle.fsdp_pretrained_load_context(True)
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert os.environ["ACCELERATE_USE_FSDP"] == os.environ["FSDP_CPU_RAM_EFFICIENT_LOADING"] == "true"
    second.__exit__(None, None, None)
    assert dict(os.environ) == before
    with pytest.raises(ZeroDivisionError), twinkle.fsdp_pretrained_load_context(True):
        raise ZeroDivisionError
    assert dict(os.environ) == before


def test_without_a_mesh_nothing_is_wrapped_and_expert_parallelism_is_refused() -> None:
    model: Any = nn.Linear(2, 2)
    assert twinkle.NativeFSDPStrategy().wrap_model(model) == (model, None)
    with pytest.raises(NotImplementedError, match="expert parallelism"):
        twinkle.NativeFSDPStrategy(ep_size=2)
