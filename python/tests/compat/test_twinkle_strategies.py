"""compat.twinkle's AccelerateStrategy beside the native one, and the verbs that both have. accelerate does no FSDP on
CPUs: tests tell it that it does, and look at what it was told."""

from __future__ import annotations

import copy
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ranks
import torch
import torch.distributed as dist
from test_twinkle import made, steps
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule

import shardow
from shardow.compat import twinkle
from shardow.compat.bagel import CHECKPOINTED_CLASSES, grad_checkpoint_check_fn

accelerate = pytest.importorskip("accelerate")
UNITS = {"transformer_cls_names_to_wrap": ["Sequential"]}


@contextmanager
def accelerated(mesh: Any, **options: Any) -> Iterator[twinkle.AccelerateStrategy]:
    """A strategy whose accelerate believes that FSDP is for CPUs."""
    world = dist.get_world_size() if dist.is_initialized() else 1
    rank = dist.get_rank() if dist.is_initialized() else 0
    told = {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "1",
        "ACCELERATE_USE_CPU": "true",
    }
    before = dict(os.environ)
    os.environ.update(told)
    try:
        with pytest.warns(RuntimeWarning, match="does no FSDP here"):
            strategy = twinkle.AccelerateStrategy(mesh, "no", fsdp_config=UNITS, **options)
        state = strategy.accelerator.state
        state.fsdp_plugin, state.distributed_type = strategy.fsdp_plugin, accelerate.DistributedType.FSDP
        accelerate.PartialState._shared_state["distributed_type"] = state.distributed_type
        assert strategy.accelerator.is_fsdp2
        yield strategy
    finally:
        accelerate.state.AcceleratorState._reset_state(True)
        accelerate.state.GradientState._reset_state()
        os.environ.clear()
        os.environ.update(before)


def trained(efficient: bool, folder: Path) -> None:
    rank = dist.get_rank()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("fsdp",))
    results = []
    for name in ("native", "accelerate"):
        model = made(1 if rank == 0 or not efficient else 5)
        trainable = [p for p in model.parameters() if p.requires_grad]
        optimizer: Any = torch.optim.AdamW([{"params": trainable[:1], "lr": 0.1}, {"params": trainable[1:]}], lr=0.01)
        if name == "native":
            native = twinkle.NativeFSDPStrategy(mesh, "no", memory_efficient_init=efficient)
            native.wrap_model(model, optimizer)
            losses = steps(model, optimizer)
            full = native.get_full_state_dict(model)
            native.save_optimizer_checkpoint(model, optimizer, folder / "optimizer.pt")
        else:
            with accelerated(mesh, memory_efficient_init=efficient) as strategy:
                prepared, optimizer = strategy.wrap_model(model, optimizer)
                assert strategy.unwrap_model(prepared) is model
                assert strategy.fsdp_plugin.cpu_ram_efficient_loading == efficient
                assert isinstance(model.model.layers[0], FSDPModule)
                assert not any(tensor.is_meta for tensor in model.state_dict().values())
                assert model.model.table is model.model.original or torch.equal(model.model.table, model.model.original)
                losses = steps(model, optimizer)
                full = strategy.get_full_state_dict(prepared)
                before = copy.deepcopy(optimizer.state_dict()["state"])
                for state in optimizer.optimizer.state.values():
                    state["exp_avg"].zero_()
                strategy.load_optimizer_checkpoint(prepared, optimizer, folder / "optimizer.pt")
                after = optimizer.state_dict()["state"]
                assert all(
                    torch.equal(local(before[i][key]), local(after[i][key])) for i in before for key in before[i]
                )
        results.append([*losses, *full.values()])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def local(tensor: torch.Tensor) -> torch.Tensor:
    return getattr(tensor, "_local_tensor", tensor)


@pytest.mark.parametrize("efficient", [True, False])
def test_both_strategies_train_alike_and_read_each_other_s_optimizer(efficient: bool, tmp_path: Path) -> None:
    ranks.run(2, trained, efficient, tmp_path)


def mesh_of(**sizes: int) -> Any:
    """As twinkle's and torch's are looked at."""
    return SimpleNamespace(mesh_dim_names=tuple(sizes), mesh=torch.zeros(tuple(sizes.values())), device_type="cpu")


def told(monkeypatch: pytest.MonkeyPatch, mesh: Any, *args: Any, **options: Any) -> dict[str, Any]:
    """The arguments of accelerate's Accelerator()."""
    found: dict[str, Any] = {}

    def stand_in(**given: Any) -> SimpleNamespace:
        found.update(given)
        os.environ["ACCELERATE_USE_FSDP"] = "true"  # as accelerate does
        return SimpleNamespace(is_fsdp2=given["fsdp_plugin"] is not None)

    monkeypatch.setattr(accelerate, "Accelerator", stand_in)
    twinkle.AccelerateStrategy(mesh, *args, **options)
    return found


def test_accelerate_is_told_what_the_mesh_and_the_options_say(monkeypatch: pytest.MonkeyPatch) -> None:
    environment, config = (
        dict(os.environ),
        {"reshard_after_forward": False, "fsdp_version": 2, "auto_wrap_policy": "no_wrap"},
    )
    given = told(
        monkeypatch, mesh_of(fsdp=4), "bf16", {"find_unused_parameters": True}, config, memory_efficient_init=True
    )
    plugin = given["fsdp_plugin"]
    assert (plugin.fsdp_version, plugin.reshard_after_forward, plugin.cpu_ram_efficient_loading) == (2, False, True)
    assert plugin.mixed_precision_policy.param_dtype == torch.bfloat16
    assert given["mixed_precision"] == "bf16"
    assert given["parallelism_config"] is None
    assert given["kwargs_handlers"][1].find_unused_parameters
    assert given["kwargs_handlers"][0].timeout.total_seconds() == 7200
    assert config == {"reshard_after_forward": False, "fsdp_version": 2, "auto_wrap_policy": "no_wrap"}
    assert dict(os.environ) == environment  # the origin's says for ever that models come without weights
    hybrid = told(monkeypatch, mesh_of(dp=2, fsdp=4), "no")["parallelism_config"]
    assert (hybrid.dp_replicate_size, hybrid.dp_shard_size) == (2, 4)
    for mesh in (None, mesh_of(dp=4)):
        assert told(monkeypatch, mesh, "no")["fsdp_plugin"] is None
    with pytest.raises(ValueError, match="'fsdp_version': 1"):
        told(monkeypatch, mesh_of(fsdp=4), "no", None, {"fsdp_version": 1})


def test_weights_are_loaded_on_rank_0_alone_inside_of_the_context(monkeypatch: pytest.MonkeyPatch) -> None:
    variables = ("ACCELERATE_USE_FSDP", "FSDP_CPU_RAM_EFFICIENT_LOADING")
    monkeypatch.setattr(accelerate, "Accelerator", lambda **_: SimpleNamespace(is_fsdp2=True))
    for efficient in (True, False):
        strategy = twinkle.AccelerateStrategy(mesh_of(fsdp=4), "no", memory_efficient_init=efficient)
        before = dict(os.environ)
        with strategy.pretrained_load_context():
            assert [os.environ.get(name) for name in variables] == (
                ["true", "true"] if efficient else [before.get(name) for name in variables]
            )
        assert dict(os.environ) == before


class Adapted(nn.Module):
    """A LoRA of one layer and of an embedding, and a head that is trained whole, under the names that PEFT gives
    them."""

    def __init__(self, adapter: str) -> None:
        super().__init__()
        self.base_model = nn.Module()
        self.base_model.model = inner = nn.Module()
        inner.q = nn.Linear(4, 4)
        inner.q.lora_A = nn.ModuleDict({adapter: nn.Linear(4, 2, bias=False), "other": nn.Linear(4, 2, bias=False)})
        inner.q.lora_B = nn.ModuleDict({adapter: nn.Linear(2, 4, bias=False)})
        inner.q.lora_embedding_A = nn.ParameterDict({adapter: nn.Parameter(torch.randn(2, 4))})
        inner.head = nn.Module()
        inner.head.modules_to_save = nn.ModuleDict({adapter: nn.Linear(4, 3)})


SAVED = {  # as PEFT calls them in adapter_model.safetensors
    "base_model.model.q.lora_A.weight": (2, 4), "base_model.model.q.lora_B.weight": (4, 2),
    "base_model.model.q.lora_embedding_A": (2, 4),
    "base_model.model.head.weight": (3, 4), "base_model.model.head.bias": (3,),
}  # fmt: skip


def adapters(everywhere: bool) -> None:
    rank = dist.get_rank()
    model = Adapted("tenant")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("fsdp",))
    strategy = twinkle.NativeFSDPStrategy(mesh, "no")
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    strategy.wrap_model(model, optimizer)
    other = model.get_parameter("base_model.model.q.lora_A.other.weight")._local_tensor.clone()  # type: ignore[attr-defined]
    torch.manual_seed(4)
    weights = {name: torch.randn(shape) for name, shape in SAVED.items()}
    strategy.load_peft_weights(model, weights if everywhere or rank == 0 else {}, "tenant")
    full = strategy.get_full_state_dict(model)
    adapter = strategy.get_adapter_state_dict(model, "tenant")
    prefix = "base_model.model.q.lora_"
    names = {
        f"{prefix}A.tenant.weight": "A.weight",
        f"{prefix}B.tenant.weight": "B.weight",
        f"{prefix}embedding_A.tenant": "embedding_A",
    }
    assert set(adapter) == (set(names) if rank == 0 else set())
    for name, tensor in adapter.items():
        assert torch.equal(tensor, weights[prefix + names[name]])
        assert torch.equal(tensor, full[name])
    if rank == 0:
        assert torch.equal(
            full["base_model.model.head.modules_to_save.tenant.bias"], weights["base_model.model.head.bias"]
        )
    assert torch.equal(model.get_parameter("base_model.model.q.lora_A.other.weight")._local_tensor, other)  # type: ignore[attr-defined]
    for wrong in ({**weights, "base_model.model.k.lora_A.weight": torch.zeros(2, 4)}, dict(list(weights.items())[1:])):
        with pytest.raises(
            KeyError if rank == 0 else shardow.Error,
            match=r"nothing was loaded: (unexpected in .*: base_model.model.k|missing in .*q.lora_A.tenant)",
        ):
            strategy.load_peft_weights(
                model, {name: 2 * tensor for name, tensor in wrong.items()} if rank == 0 else None, "tenant"
            )
    again = strategy.get_adapter_state_dict(model, "tenant")
    assert all(torch.equal(again[name], tensor) for name, tensor in adapter.items())


def test_adapters_are_loaded_and_gathered_whole() -> None:
    for everywhere in (True, False):
        ranks.run(2, adapters, everywhere)


def test_verbs_of_expert_parallelism_leave_everything_to_the_model() -> None:
    strategy, config = twinkle.NativeFSDPStrategy(), {"r": 8}
    model = nn.Linear(2, 2)
    assert strategy.capture_pre_ep_state_if_needed(model, enable_ep=True) is None  # type: ignore[func-returns-value]
    assert strategy.prepare_adapter_config(config, enable_ep=True) is config
    assert strategy.get_ep_clip_kwargs(model) == {}
    assert strategy.adjust_optimizer_kwargs("AdamW", {"lr": 1}) == {"lr": 1}
    assert strategy.needs_wrapped_optimizer_state() is False


def test_a_plain_optimizer_s_state_goes_through_one_file(tmp_path: Path) -> None:
    strategy, model = twinkle.NativeFSDPStrategy(), nn.Linear(2, 2)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(2)).sum().backward()
    optimizer.step()
    strategy.save_optimizer_checkpoint(model, optimizer, tmp_path / "optimizer.pt")
    again = torch.optim.Adam(model.parameters())
    strategy.load_optimizer_checkpoint(model, again, tmp_path / "optimizer.pt")
    assert torch.equal(again.state[model.weight]["exp_avg"], optimizer.state[model.weight]["exp_avg"])
    (tmp_path / "optimizer.pt").write_bytes(b"half")
    with pytest.raises(ValueError, match=r"optimizer\.pt is not a whole file"):
        strategy.load_optimizer_checkpoint(model, again, tmp_path / "optimizer.pt")


def test_bagel_s_modules_whose_activations_are_recomputed_are_told_by_name() -> None:
    decoder = type("Qwen2MoTDecoderLayer", (nn.Linear,), {})
    assert grad_checkpoint_check_fn(type("Mine", (decoder,), {})(2, 2))
    assert not grad_checkpoint_check_fn(type("TimestepEmbedder", (nn.Linear,), {})(2, 2))  # a unit of FSDP alone
    assert "SiglipEncoderLayer" in CHECKPOINTED_CLASSES


class Layer(nn.Linear):
    pass


class Decoder(nn.Module):
    _no_split_modules: tuple[str, ...] | None = None

    def __init__(self, layers: str, classes: tuple[type[nn.Module], ...]) -> None:
        super().__init__()
        self.embed = nn.Embedding(4, 4)
        setattr(self, layers, nn.ModuleList(cls(4, 4) for cls in classes))
        self.head = Layer(4, 4)
        self.head.weight = self.embed.weight


class Named(Decoder):
    _no_split_modules = ("Layer", "Absent")


def wrapped_units(model: nn.Module) -> set[str]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("fsdp",))
    twinkle.NativeFSDPStrategy(mesh, "no").wrap_model(model)
    return {name for name, module in model.named_modules() if isinstance(module, FSDPModule)}


def units_of_every_kind() -> None:
    def under(name: str, inner: nn.Module) -> nn.Module:
        outer = nn.Module()
        outer.add_module(name, inner)
        return outer

    # Wrapped twice, as PEFT does it; the head has the embedding's weight, so that it can't be a unit.
    lora = under("base_model", under("model", Named("h", (Layer, nn.Linear))))
    assert wrapped_units(lora) == {"", "base_model.model.h.0"}
    assert wrapped_units(under("model", Decoder("layers", (Layer, nn.Linear)))) == {
        "", "model.layers.0", "model.layers.1"
    }  # fmt: skip
    assert wrapped_units(under("transformer", Decoder("h", (Layer, Layer)))) == {
        "", "transformer.h.0", "transformer.h.1"
    }  # fmt: skip
    with pytest.warns(UserWarning, match="one unit"):
        assert wrapped_units(under("transformer", Decoder("h", (Layer,)))) == {""}


def test_native_wrap_finds_layers_of_any_model() -> None:
    ranks.run(2, units_of_every_kind)
