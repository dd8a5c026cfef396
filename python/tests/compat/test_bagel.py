"""compat.bagel: the origin's formula, its five files, and the defects that SEEDS lists for it."""

from __future__ import annotations

import copy
import os
from typing import Any

import pytest
import ranks
import torch
import walks
from bagel_models import FULL, made, pair, same, whole
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

from shardow.compat import bagel
from shardow.compat.bagel import FSDPConfig, fsdp_ema_setup, fsdp_ema_update, fsdp_wrapper


def wander(model: nn.Module, seed: int = 0) -> None:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in model.parameters():
            local = getattr(p, "_local_tensor", p)
            if p.requires_grad:
                local.add_(torch.randn(local.shape, generator=generator), alpha=0.1)


def _walks(steps: int) -> None:
    """FSDP1's flat parameters, and FSDP2's shards, by the origin's formula."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(bagel, "WRAPPED_CLASSES", {"Linear", "Embedding", "Conv2d", "TransformerEncoderLayer"})
        for name in walks.NAMES:
            for kind in ("fsdp1", "fsdp2"):
                both = []
                for _ in range(2):
                    one = walks.model(name).to(memory_format=torch.contiguous_format)
                    if hasattr(one, "scale"):
                        one.scale = nn.Parameter(one.scale.detach().view(1))  # FSDP has no scalars
                    both.append(one)
                if kind == "fsdp1":
                    ema_model, model = fsdp_ema_setup(both[0], FULL), fsdp_wrapper(both[1], FULL)
                    trained = [p for p in model.parameters() if p.requires_grad]
                    flat = [
                        one._handle.flat_param
                        for one in FullyShardedDataParallel.fsdp_modules(ema_model)
                        if one._handle is not None
                    ]
                    averages = [e for e, p in zip(flat, [*model.parameters()], strict=True) if p.requires_grad]
                else:
                    ema_model, model = (fully_shard(one) for one in both)  # type: ignore[assignment]
                    trained = [p._local_tensor for p in model.parameters() if p.requires_grad]  # type: ignore[attr-defined]
                    both_parameters: Any = zip(ema_model.parameters(), model.parameters(), strict=True)
                    averages = [e._local_tensor for e, p in both_parameters if p.requires_grad]
                expected = [e.detach().clone() for e in averages]
                for _ in walks.walk(model, name, steps):
                    fsdp_ema_update(ema_model, model, decay=0.999)
                    torch._foreach_mul_(expected, 0.999)
                    torch._foreach_add_(expected, [p.detach() for p in trained], alpha=1 - 0.999)
                for e, x in zip(averages, expected, strict=True):
                    count = e.numel() - getattr(
                        e, "_shard_numel_padded", 0
                    )  # FSDP1 pads the last rank's, which no weight is in
                    assert torch.equal(e.detach().view(-1)[:count], x.view(-1)[:count]), (name, kind)


@pytest.mark.parametrize("world", [1, 2, 4])
def test_1000_steps_equal_the_formula_bit_for_bit(world: int) -> None:
    ranks.run(world, _walks, walks.STEPS if world == 2 or os.environ.get("SHARDOW_ALL") else 50)


def _trains(strategy: str, num_replicate: int, num_shard: int) -> None:
    config = FSDPConfig(strategy, "BACKWARD_PRE", False, num_replicate, num_shard)
    ema_model, model = pair("fsdp1", config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    expected = whole(ema_model)
    for step in range(3):
        model(torch.arange(6).view(2, 3) % 7).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        fsdp_ema_update(ema_model, model, decay=0.9)
        for name, weight in whole(model).items():
            if name != "latent_pos_embed.pos_embed":
                expected[name].mul_(0.9).add_(weight, alpha=1 - 0.9)
        assert same(whole(ema_model), expected), step
    with torch.no_grad():
        assert ema_model(torch.zeros(1, 1, dtype=torch.int64)).dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("strategy", "num_replicate", "num_shard"),
    [
        ("FULL_SHARD", 1, 4),
        ("HYBRID_SHARD", 2, 2),
        ("NO_SHARD", 1, 4),
        ("SHARD_GRAD_OP", 1, 4),
        ("_HYBRID_SHARD_ZERO2", 2, 2),
    ],
)
def test_every_strategy_that_fsdp_has_is_trained_and_averaged(
    strategy: str, num_replicate: int, num_shard: int
) -> None:
    """The origin has FULL_SHARD and HYBRID_SHARD alone."""
    ranks.run(4, _trains, strategy, num_replicate, num_shard)


def test_models_of_other_names_or_shapes_are_refused_with_names() -> None:
    """The origin asserts the number of flat parameters alone."""
    ema_model, model = pair("plain")
    before = copy.deepcopy(ema_model.state_dict())
    model.second[1] = nn.Linear(3, 9)  # type: ignore[index, operator]
    for error in (AssertionError, ValueError):
        with pytest.raises(error, match=r"'second.1.weight' has shape \[9, 3\] in the model and \[4, 3\] in its"):
            fsdp_ema_update(ema_model, model)
    model.second = nn.Sequential(*model.second, nn.Linear(9, 2))  # type: ignore[misc]
    with pytest.raises(AssertionError, match=r"unexpected in the model: second.2.weight"):
        fsdp_ema_update(ema_model, model)
    assert same(ema_model.state_dict(), before)


@pytest.mark.parametrize("kind", ["plain", "fsdp1", "fsdp2"])
def test_a_model_that_is_frozen_altogether_is_no_error(kind: str) -> None:
    """The origin gives torch._foreach_mul_() an empty list."""
    ranks.run(2, _frozen, kind)


def _frozen(kind: str) -> None:
    ema_model, model = pair(kind)
    before = whole(ema_model)
    model.requires_grad_(False)
    fsdp_ema_update(ema_model, model)
    assert same(whole(ema_model), before)


@pytest.mark.parametrize("kind", ["plain", "fsdp2"])
def test_what_is_trained_is_told_by_each_parameter_and_may_change(kind: str) -> None:
    """The origin takes a flat parameter's word for all in it."""
    ranks.run(1, _changes, kind)


def _changes(kind: str) -> None:
    ema_model, model = pair(kind)
    expected = whole(ema_model)
    frozen = model.first[0].weight  # type: ignore[index, union-attr]
    for step, trains in enumerate((True, False, True)):
        wander(model, step)
        frozen.requires_grad_(trains)
        fsdp_ema_update(ema_model, model, decay=0.5)
        for name, weight in whole(model).items():
            if name != "latent_pos_embed.pos_embed" and (trains or name != "first.0.weight"):
                expected[name].mul_(0.5).add_(weight, alpha=0.5)
        assert same(whole(ema_model), expected), step


def test_averages_of_16_bits_are_warned_of() -> None:
    ema_model, model = made().bfloat16(), made()
    with pytest.warns(RuntimeWarning, match="rounded to nearest"):
        fsdp_ema_update(ema_model, model)
