"""compat.causal_forcing: EMA_FSDP against its own recursion, its files, and what the origin got wrong there."""

from __future__ import annotations

import copy
import os
import pickle
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import models
import pytest
import ranks
import sharded
import torch
import torch.distributed as dist
import walks
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel

import shardow
from shardow.compat import causal_forcing
from shardow.compat._model_pt import read_model_pt
from shardow.compat.causal_forcing import EMA_FSDP, fsdp_state_dict, fsdp_wrap, load_model_pt, write_model_pt

DECAYS = (0.999, 0.9, 0.99)  # of the steps to 500, to 510, and after: .decay acts at once
State = dict[str, torch.Tensor]


class Dense:
    """The origin's recursion on a whole model."""

    def __init__(self, model: nn.Module) -> None:
        self.shadow = {name: p.detach().clone().float() for name, p in model.named_parameters()}

    @torch.no_grad()
    def update(self, model: nn.Module, d: float) -> None:
        for name, p in model.named_parameters():
            self.shadow[name].mul_(d).add_(p.detach().float(), alpha=1.0 - d)


def decay_at(step: int) -> float:
    return DECAYS[(step > 500) + (step > 510)]


def assert_same(found: State, expected: State) -> None:
    assert list(found) == list(expected)
    for name, tensor in expected.items():
        assert found[name].dtype == torch.float32
        assert torch.equal(found[name], tensor), name


def follow(world: int, kinds: tuple[str, ...], name: str, steps: int) -> None:
    """Every kind of sharding watches one walk; each ends at the dense averages."""
    model = sharded.whole(name)
    shared = [sharded.copied(kind, model, world) for kind in kinds]
    setters = [sharded.setter(one, model) for one in shared]
    emas = [EMA_FSDP(one, DECAYS[0]) for one in shared]
    dense = Dense(model)
    for step in walks.walk(model, name, steps):
        for set_, ema, one in zip(setters, emas, shared, strict=True):
            set_()
            ema.decay = decay_at(step)
            ema.update(one)
        dense.update(model, decay_at(step))
    for kind, ema in zip(kinds, emas, strict=True):
        full = ema.full_state_dict(key_style="clean")
        if dist.get_rank() == 0 or kind == "plain":
            assert_same(full, dense.shadow)
        else:
            assert full == {}


@pytest.mark.parametrize("name", walks.NAMES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_plain_model_s_averages_are_the_origin_s_bit_for_bit(name: str, dtype: torch.dtype) -> None:
    model = sharded.whole(name, dtype)
    ema, held, dense = EMA_FSDP(model, DECAYS[0]), EMA_FSDP(SimpleNamespace(module=model), DECAYS[0]), Dense(model)
    for step in walks.walk(model, name):
        ema.decay = held.decay = decay_at(step)
        ema.update(model)
        held.update(SimpleNamespace(module=model))
        dense.update(model, decay_at(step))
    assert_same(ema.full_state_dict(model), dense.shadow)
    assert_same(dict(held.shadow), dense.shadow)


@pytest.mark.parametrize(
    ("world", "kinds", "steps"),
    [(2, ("fsdp1", "fsdp2"), walks.STEPS), (4, ("hsdp",), walks.STEPS), (4, ("fsdp1-hybrid", "fsdp1-flat", "ddp", "plain"), 40)]
    if not os.environ.get("SHARDOW_ALL")
    else [(world, sharded.kinds(world), walks.STEPS) for world in (2, 4)],
)
@pytest.mark.parametrize("name", walks.NAMES)
def test_shared_models_have_the_dense_averages_bit_for_bit(name: str, world: int, kinds: tuple[str, ...], steps: int) -> None:
    ranks.run(world, follow, world, kinds, name, steps)


def _own_parts() -> None:
    """What `shadow` holds is what the origin's loop over local views makes."""
    model = models.build("fsdp1", 2)
    inner: Any = model.module
    local = {name: p.detach().clone().float() for name, p in inner.named_parameters()}
    ema = EMA_FSDP(model, 0.9)
    for _ in range(3):
        with torch.no_grad():
            for p in model.parameters():
                p.add_(torch.randn(p.shape))
        ema.update(model)
        for name, p in inner.named_parameters():
            local[name].mul_(0.9).add_(p.detach().float(), alpha=1.0 - 0.9)
    assert_same(
        {name: getattr(piece, "local", piece).reshape(-1) for name, piece in ema.shadow.items()},
        {n: t.reshape(-1) for n, t in local.items()},
    )
    assert any("_fsdp_wrapped_module" in name for name in local)
    with pytest.raises(TypeError, match=r"write shadow\['0"):
        ema.shadow[next(iter(local))] = torch.zeros(1)
    assert type(pickle.loads(pickle.dumps(ema.shadow))) is dict
    next(iter(ema.shadow.values())).zero_()
    first = next(iter(ema.state_dict().values()))
    assert not getattr(first, "local", first).any()


def test_shadow_is_this_rank_s_memory_under_the_origin_s_names() -> None:
    ranks.run(2, _own_parts)


# ---- what the origin got wrong, by the numbers of its list


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.ffn = nn.Linear(6, 6), nn.Linear(6, 9)
        self.gate = nn.Parameter(torch.rand(8, 6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.ffn(self.q(x))[:, :6] * self.gate[0]  # type: ignore[no-any-return]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(Block(), Block())
        self.register_buffer("freqs", torch.arange(3.0))
        self.head = nn.Linear(6, 5)
        self.modulation = nn.Parameter(torch.rand(8, 5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.blocks(x)) + self.modulation[1]  # type: ignore[no-any-return]


class Wrapper(nn.Module):
    """As WanDiffusionWrapper: the network is at .model."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.model = Net().to(dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.model(x)  # type: ignore[no-any-return]


def generator(**options: Any) -> FullyShardedDataParallel:
    """Every block, and what holds it, wrapped: several prefixes in one key."""
    return fsdp_wrap(Wrapper(options.pop("dtype", torch.float32)), **{"min_num_params": 40, **options})


@torch.no_grad()
def shake(model: nn.Module, seed: int) -> None:
    """The same change of the whole on any number of ranks."""
    whole = Wrapper()
    torch.manual_seed(seed)
    for p in whole.parameters():
        p.normal_()
    shardow.materialize(model, {**dict(whole.named_buffers()), **dict(whole.named_parameters())})


def averaged(model: nn.Module, **options: Any) -> EMA_FSDP:
    ema = EMA_FSDP(model, 0.5, **options)
    for seed in (1, 2):
        shake(model, seed)
        ema.update(model)
    return ema


def expected() -> State:
    model = Wrapper()
    return averaged(model).full_state_dict()


def _gather_raises() -> None:
    model = generator()
    ema = averaged(model)
    before = models.whole_weights(model)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "isend", _cut)
        patch.setattr(dist, "irecv", _cut)
        with pytest.raises(OSError, match="cable"):
            ema.full_state_dict(model)
    after = models.whole_weights(model)
    assert all(torch.equal(before[name], after[name]) for name in before)


def _cut(*_: Any, **__: Any) -> None:
    raise OSError("cable")


def test_defect_1_a_gather_that_fails_leaves_the_live_weights() -> None:
    ranks.run(2, _gather_raises)


def _every_key(transformer: bool) -> None:
    model = generator(wrap_strategy="transformer", transformer_module=Block) if transformer else generator()
    names = [name for name, _ in model.module.named_parameters()]
    assert max(name.count("_fsdp_wrapped_module") for name in names) >= (1 if transformer else 3)
    ema, whole = averaged(model), expected()
    wrapped, clean = ema.full_state_dict(model), ema.full_state_dict(model, key_style="clean")
    if dist.get_rank() == 0:
        assert list(wrapped) == names
        assert_same(clean, whole)
        assert all(torch.equal(a, b) for a, b in zip(wrapped.values(), clean.values(), strict=True))
    else:
        assert wrapped == clean == {}
    with pytest.raises(ValueError, match="key_style='dirty'"):
        ema.full_state_dict(key_style="dirty")


@pytest.mark.parametrize("transformer", [False, True])
def test_defect_2_every_parameter_is_saved_whatever_is_wrapped(transformer: bool) -> None:
    ranks.run(2, _every_key, transformer)


def _write(folder: str) -> None:
    model = generator()
    ema = averaged(model)
    for style in ("wrapped", "clean"):
        write_model_pt(f"{folder}/{style}.pt", ema, key_style=style, generator=model, critic=model)
    ema.decay = 0.25
    ema.save(f"{folder}/own.safetensors")
    torch.save(ema.state_dict(), f"{folder}/parts{dist.get_rank()}.pt")
    parts = torch.load(f"{folder}/parts{dist.get_rank()}.pt")
    shake(model, 9)
    ema.update()
    ema.load_state_dict(parts)
    full = ema.full_state_dict(key_style="clean")
    if dist.get_rank() == 0:
        assert_same(full, expected())


def _read(folder: str) -> None:
    whole = expected()
    for style in ("wrapped", "clean"):
        model = generator()
        ema = EMA_FSDP(model, 0.5)
        load_model_pt(ema, f"{folder}/{style}.pt")
        full = ema.full_state_dict(key_style="clean")
        assert dist.get_rank() > 0 or full.keys() == whole.keys()
        assert all(torch.equal(full[name], whole[name]) for name in full)
        for target in (generator(), models.PARALLEL["fsdp2"](Wrapper(), dist.get_world_size()), Wrapper()):
            load_model_pt(target, f"{folder}/{style}.pt")
            live = models.whole_weights(target)
            assert all(torch.equal(live[name], whole[name]) for name in whole)
    ema.load(f"{folder}/own.safetensors")
    assert ema.decay == 0.25
    assert ema.ema.stats()["step"] == 2
    full = ema.full_state_dict(key_style="clean")
    assert all(torch.equal(full[name], whole[name]) for name in full)
    shake(model, 3)
    ema.update(model)
    full, shaken = ema.full_state_dict(key_style="clean"), models.whole_weights(model)
    assert all(torch.equal(full[name], whole[name].mul(0.25).add(shaken[name], alpha=0.75)) for name in full)


def test_defects_3_and_10_files_of_either_style_are_read_back_at_another_world_size(tmp_path: Path) -> None:
    ranks.run(2, _write, str(tmp_path))
    ranks.run(4, _read, str(tmp_path))
    for style in ("wrapped", "clean"):
        fresh = Wrapper()
        fresh.load_state_dict({**dict(fresh.named_buffers()), **read_model_pt(tmp_path / f"{style}.pt")})
        assert_same(dict(fresh.named_parameters()), expected())
        assert set(read_model_pt(tmp_path / f"{style}.pt", "generator")) == set(fresh.state_dict())
    keys = list(torch.load(tmp_path / "wrapped.pt")["generator_ema"])
    assert all("_fsdp_wrapped_module" in key for key in keys if "blocks" in key)
    assert sorted(p.name for p in tmp_path.iterdir() if p.suffix == ".tmp") == []


def test_defect_3_a_local_part_is_not_taken_for_a_whole_tensor() -> None:
    ema = averaged(Wrapper())
    before = {name: tensor.clone() for name, tensor in ema.shadow.items()}
    for wrong in (
        {**before, "model.head.bias": torch.ones(1)},  # would be spread over the whole
        {name: tensor for name, tensor in before.items() if name != "model.head.bias"},
        {**before, "model.tail.bias": torch.ones(1)},
        {**before, "model.head.bias": torch.ones(5, dtype=torch.int64)},
    ):
        with pytest.raises(ValueError, match=r"model\.(head|tail)\.bias"):
            ema.load_state_dict({name: tensor + 1 for name, tensor in wrong.items()})
    assert_same(dict(ema.shadow), before)


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
        with pytest.raises(kind, match=r"'model\.extra\.weight' has no average"):
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
    ("kind", "world", "replicas"), [("fsdp1", 2, "split"), ("hsdp", 4, "split"), ("hsdp", 4, "copy"), ("ddp", 2, "split")]
)
def test_defect_8_copy_to_reaches_a_model_that_is_only_run(kind: str, world: int, replicas: str) -> None:
    ranks.run(world, _no_stale_copy, kind, replicas)


def _gathers(folder: str) -> int:
    model = generator()
    ema = averaged(model)
    calls = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("shardow.compat._model_pt.whole_state_dict", lambda model: calls.append(model))
        write_model_pt(f"{folder}/model.pt", ema)
    whole = fsdp_state_dict(model)
    assert (set(whole) == set(Wrapper().state_dict())) if dist.get_rank() == 0 else whole == {}
    return len(calls)


def test_defect_9_nothing_is_gathered_that_is_not_written(tmp_path: Path) -> None:
    assert ranks.run(2, _gathers, str(tmp_path)) == [0, 0]
    assert list(torch.load(tmp_path / "model.pt")) == ["generator_ema"]


def _fails_everywhere(folder: str) -> None:
    ema = averaged(generator())
    with pytest.raises(OSError, match="No such file"):
        write_model_pt(f"{folder}/missing/model.pt", ema)
    with pytest.raises((KeyError, OSError), match=r"has no 'generator'|there is no file"):
        load_model_pt(ema, f"{folder}/model.pt" if dist.get_rank() else f"{folder}/nowhere.pt", "generator")


def test_a_failure_on_one_rank_is_one_on_all(tmp_path: Path) -> None:
    torch.save({"generator_ema": {}}, tmp_path / "model.pt")
    ranks.run(2, _fails_everywhere, str(tmp_path))


# ---- files and helpers


def test_longlive_s_cleaned_keys_and_odd_files_are_told_apart(tmp_path: Path) -> None:
    ema, path = averaged(Wrapper()), tmp_path / "model.pt"
    torch.save({"generator_ema": {f"_orig_mod.{name}": tensor for name, tensor in expected().items()}}, path)
    fresh = EMA_FSDP(Wrapper())
    load_model_pt(fresh, path)
    assert_same(dict(fresh.shadow), dict(ema.shadow))
    with pytest.raises(KeyError, match="has no 'generator'; it has 'generator_ema'"):
        read_model_pt(path, "generator")
    torch.save({"generator_ema": {"a.b": torch.ones(1), "a._orig_mod.b": torch.ones(1)}}, path)
    with pytest.raises(ValueError, match=r"'a\.b' twice"):
        read_model_pt(path)
    path.write_bytes(b"PK no archive")
    with pytest.raises(ValueError, match="not a whole file of tensors"):
        read_model_pt(path)
    with pytest.raises(FileNotFoundError, match="there is no file"):
        read_model_pt(tmp_path / "none.pt")
    with pytest.raises(ValueError, match="nothing to write"):
        write_model_pt(path)


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
    started: dict[str, Any] = {}
    monkeypatch.setattr(dist, "init_process_group", lambda backend, **options: started.update(options, backend=backend))
    for name, value in {"RANK": "1", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "::1", "MASTER_PORT": "29500"}.items():
        monkeypatch.setenv(name, value)
    causal_forcing.launch_distributed_job("gloo")
    assert {key: started[key] for key in ("backend", "init_method", "rank", "world_size")} == {
        "backend": "gloo", "init_method": "tcp://[::1]:29500", "rank": 1, "world_size": 2,
    }  # fmt: skip


def keeps_whole_tensors(folder: Path) -> None:
    """Self-Forcing's trainer, which has the whole on every rank: what it saves on rank 0, and what it takes back on all."""
    rank, world = dist.get_rank(), dist.get_world_size()
    generator = models.build("fsdp1", world)
    ema = EMA_FSDP(generator, 0.5)
    expected = dict(zip(ema.shadow, models.whole_weights(generator).values(), strict=True))
    content = {"generator": fsdp_state_dict(generator), "generator_ema": ema.full_state_dict(generator)}
    if rank == 0:
        with pytest.warns(UserWarning, match="part"):  # the line as it was: rank 0's part
            pickle.dumps(ema.state_dict())
        torch.save(content, folder / "model.pt")
    dist.barrier()
    content = torch.load(folder / "model.pt", map_location="cpu", weights_only=True)
    assert_same(content["generator_ema"], expected)
    doubled = {name: 2 * tensor for name, tensor in content["generator_ema"].items()}
    ema.shadow = doubled
    assert_same({name: tensor.cpu() for name, tensor in ema.full_state_dict().items()}, doubled if rank == 0 else {})
    ema.shadow = {name: tensor.clone() for name, tensor in ema.shadow.items()}  # own parts
    assert_same(ema.full_state_dict(), doubled if rank == 0 else {})
    before = ema.full_state_dict()
    with pytest.raises(ValueError, match=r"nothing was loaded|does not fit"):
        ema.shadow = {name: tensor[:1] for name, tensor in doubled.items()}
    assert_same(ema.full_state_dict(), before)


def test_a_trainer_that_keeps_whole_tensors_saves_and_takes_back_whole_ones(tmp_path: Path) -> None:
    ranks.run(2, keeps_whole_tensors, tmp_path)
