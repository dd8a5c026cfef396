"""Self-Forcing's averages in training: what the origin got wrong, by the numbers of its list; wrapping and
launching."""

from __future__ import annotations

import copy
import socket

import models
import pytest
import ranks
import torch
import torch.distributed as dist
from causal_forcing_models import Wrapper, assert_same, averaged, expected, generator, shake
from torch import nn

import shardow
from shardow.compat import causal_forcing
from shardow.compat.causal_forcing import EMA_FSDP, fsdp_wrap


def test_defect_4_an_average_that_was_made_before_the_checkpoint_was_loaded_follows_it() -> None:
    model = Wrapper()
    ema = EMA_FSDP(model, 0.9, start_step=1)
    shake(model, 4)
    ema.update(model)
    assert_same(dict(ema.shadow), dict(model.named_parameters()))


def test_defect_5_names_that_do_not_match_are_errors_before_anything_changes() -> None:
    model = Wrapper()
    ema = averaged(model)
    other = Wrapper()
    other.model.extra = nn.Linear(2, 2)
    before = copy.deepcopy(other.state_dict())
    for kind in (KeyError, ValueError):
        with pytest.raises(kind, match=r"unexpected in the module: model\.extra\.weight"):
            ema.copy_to(other)
        with pytest.raises(kind, match="not the module that the averages are of"):
            ema.update(other)
    assert all(torch.equal(tensor, before[name]) for name, tensor in other.state_dict().items())
    model.model.extra = nn.Linear(2, 2)
    with pytest.raises(KeyError, match=r"'model\.extra\.weight' has been added"):
        ema.update(model)
    with pytest.raises(AttributeError, match=r"int is no nn\.Module"):
        EMA_FSDP(3)
    with pytest.raises(ValueError, match="decay"):
        ema.decay = 1.5


def _bf16() -> None:
    model = generator(dtype=torch.bfloat16)
    ema = EMA_FSDP(model, 0.999)
    before = models.whole_weights(model)
    for seed in range(3):
        shake(model, seed)
        ema.update(model)
    full = ema.full_state_dict(key_style="clean")
    assert all(tensor.dtype == torch.float32 for tensor in full.values())
    assert not full or any(not torch.equal(tensor, tensor.bfloat16().float()) for tensor in full.values())
    live = models.whole_weights(model)
    with ema.swapped():
        inside = models.whole_weights(model)
    assert all(torch.equal(inside[name], full[name].bfloat16()) for name in full)
    after, again = models.whole_weights(model), ema.full_state_dict(key_style="clean")
    assert all(torch.equal(after[name], live[name]) for name in live)
    assert all(torch.equal(again[name], full[name]) for name in full)
    assert before.keys() == live.keys()


def test_defect_6_averages_of_bf16_weights_are_saved_and_swapped_as_float32() -> None:
    ranks.run(2, _bf16)


def test_defect_7_a_step_that_was_not_finite_poisons_nothing() -> None:
    model = Wrapper()
    ema = averaged(model)
    before = {name: tensor.clone() for name, tensor in ema.shadow.items()}
    with torch.no_grad():
        model.model.head.weight.fill_(float("nan"))
    with pytest.warns(RuntimeWarning, match="NaN or Inf"):
        ema.update(model)
    assert torch.equal(ema.shadow["model.head.weight"], before["model.head.weight"])
    assert ema.ema.stats()["held_nonfinite"] == 30


def _no_stale_copy(kind: str, replicas: str) -> None:
    """A forward without backward leaves the root unsharded; copy_to() is seen by the next one all the same."""
    world = dist.get_world_size()
    model = generator() if kind == "fsdp1" else models.PARALLEL[kind](Wrapper(), world)
    ema, whole = averaged(model, replicas=replicas), Wrapper()
    whole.load_state_dict({**dict(whole.named_buffers()), **expected()})
    x = torch.randn(3, 6, generator=torch.Generator().manual_seed(1))
    targets: list[nn.Module] = [model, generator(), models.PARALLEL[kind](Wrapper(), world), Wrapper()]
    with torch.no_grad():
        for target in targets:
            for _ in range(2):
                target(x)
                ema.copy_to(target)
                torch.testing.assert_close(target(x), whole(x))
    live = models.whole_weights(targets[2])
    assert all(torch.equal(live[name], value) for name, value in whole.named_parameters())


@pytest.mark.parametrize(
    ("kind", "world", "replicas"),
    [("fsdp1", 2, "split"), ("hsdp", 4, "split"), ("hsdp", 4, "copy"), ("ddp", 2, "split")],
)
def test_defect_8_copy_to_reaches_a_model_that_is_only_run(kind: str, world: int, replicas: str) -> None:
    ranks.run(world, _no_stale_copy, kind, replicas)


def _strategies() -> None:
    for strategy in ("full", "no_shard"):
        model = fsdp_wrap(Wrapper(), strategy, mixed_precision=True)
        assert model(torch.ones(2, 6)).dtype == torch.bfloat16
    for kind in (KeyError, ValueError):
        with pytest.raises(kind, match="sharding_strategy='half'; there are 'full'"):
            fsdp_wrap(Wrapper(), "half")
    with pytest.raises(ValueError, match="wrap_strategy='none'"):
        fsdp_wrap(Wrapper(), wrap_strategy="none")
    with pytest.raises(ValueError, match="needs transformer_module="):
        fsdp_wrap(Wrapper(), wrap_strategy="transformer")
    causal_forcing.barrier()


def test_wrapping_takes_the_origin_s_words() -> None:
    ranks.run(2, _strategies)


def test_a_job_is_launched_by_torchrun_s_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    causal_forcing.barrier()  # of one process: nothing
    address, family = ("::1", socket.AF_INET6) if socket.has_ipv6 else ("127.0.0.1", socket.AF_INET)
    with socket.create_server((address, 0), family=family) as free:
        port = free.getsockname()[1]
    variables = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": address, "MASTER_PORT": str(port)}
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    causal_forcing.launch_distributed_job("gloo")
    try:
        assert (dist.get_rank(), dist.get_world_size(), dist.get_backend()) == (0, 1, "gloo")
        causal_forcing.barrier()
    finally:
        dist.destroy_process_group()


def test_a_module_that_holds_another_emas_averages_is_not_copied_to() -> None:
    """They would be lost: the way back would take what was copied for them."""
    model, other = nn.Linear(3, 2), nn.Linear(3, 2)
    ema, holding = EMA_FSDP(model, 0.5), shardow.EMA(other, 0.9)
    averages = holding.full_state_dict(complete=False)
    with holding.swapped(), pytest.raises(ValueError, match="an EMA has its averages in this model"):
        ema.copy_to(other)
    assert_same(holding.full_state_dict(complete=False), averages)
    ema.copy_to(other)
