"""compat.diffusers beside diffusers: 1,000 steps bit for bit, states and saved models both ways, what went wrong there, and shards."""

from __future__ import annotations

import copy
import itertools
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import ranks
import torch
import walks
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from shardow.compat.diffusers import EMAModel

pytestmark = [
    pytest.mark.filterwarnings("ignore::FutureWarning:diffusers"),
    pytest.mark.filterwarnings("ignore:.*deprecated:FutureWarning"),
]
training_utils = pytest.importorskip("diffusers.training_utils")
UNet2DModel = pytest.importorskip("diffusers").UNet2DModel

OPTIONS: list[dict[str, Any]] = [
    {**some, "foreach": foreach}
    for foreach in (False, True)
    for some in (
        {},
        {"decay": 0.9},
        {"decay": 0.95, "min_decay": 0.5, "update_after_step": 7},
        {"use_ema_warmup": True},
        {"use_ema_warmup": True, "inv_gamma": 3, "power": 0.75, "decay": 0.97, "update_after_step": 40},
        {"decay": 0.0},
    )
]
COUNTERS = ("decay", "min_decay", "optimization_step", "update_after_step", "use_ema_warmup", "inv_gamma", "power")


def _same(ours: EMAModel, theirs: Any) -> bool:
    a, b = ours.state_dict(), theirs.state_dict()
    return (
        list(a) == list(b)
        and ours.cur_decay_value == theirs.cur_decay_value
        and all(a[key] == b[key] for key in COUNTERS)
        and _equal(ours.shadow_params, theirs.shadow_params)
    )


def _equal(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    return len(a) == len(b) and all(map(torch.equal, a, b))


@pytest.mark.parametrize("name", walks.NAMES)
def test_a_thousand_steps_are_the_origins_bit_for_bit(name: str) -> None:
    """Frozen parameters are copied; which are frozen changes on the way."""
    model = walks.model(name)
    ours = [EMAModel(model.parameters(), **options) for options in OPTIONS]
    theirs = [training_utils.EMAModel(model.parameters(), **options) for options in OPTIONS]
    changing = next(p for p in model.parameters() if p.requires_grad)
    for step in walks.walk(model, name):
        if step in (300, 600):
            changing.requires_grad_(step == 600)
        parameters = list(model.parameters())
        for ema in (*ours, *theirs):
            ema.step(parameters)
        if step in (1, 2, 9, 300, 301, 600, walks.STEPS):
            assert all(map(_same, ours, theirs)), step
    for a, b in zip(ours, theirs, strict=True):
        assert [a.get_decay(step) for step in range(-1, 60)] == [b.get_decay(step) for step in range(-1, 60)]
    ours[0].store(model.parameters())
    ours[0].copy_to(model.parameters())
    assert _equal(list(model.parameters()), theirs[0].shadow_params)
    ours[0].restore(model.parameters())
    assert _equal(list(model.parameters()), parameters)
    assert ours[0].temp_stored_params is None


@pytest.mark.parametrize(("dtype", "foreach"), list(itertools.product((torch.float64, torch.bfloat16, torch.float16), (False, True))))
@pytest.mark.filterwarnings("ignore:averages in torch")
def test_other_dtypes_too(dtype: torch.dtype, foreach: bool) -> None:
    model = walks.model("mlp", dtype)
    ours, theirs = (cls(model.parameters(), 0.97, foreach=foreach) for cls in (EMAModel, training_utils.EMAModel))
    for step in walks.walk(model, "mlp", 60):
        if step == 30:
            ours.to(dtype=torch.float32)
            theirs.to(dtype=torch.float32)
        ours.step(model.parameters())
        theirs.step(model.parameters())
    assert _same(ours, theirs)


@pytest.mark.parametrize("file", [False, True])
def test_states_go_both_ways_and_the_training_goes_on(file: bool) -> None:
    model = walks.model("blocks")
    ours, theirs = (cls(model.parameters(), 0.9, use_ema_warmup=True) for cls in (EMAModel, training_utils.EMAModel))
    for step in walks.walk(model, "blocks", 40):
        if step == 20:
            states = ours.state_dict(), theirs.state_dict()
            theirs, ours = (cls(model.parameters(), 0.5) for cls in (training_utils.EMAModel, EMAModel))
            for ema, state in zip((theirs, ours), states, strict=True):
                ema.load_state_dict(walks.through_a_file(state) if file else state)
        ours.step(model.parameters())
        theirs.step(model.parameters())
    assert _same(ours, theirs)


def test_deprecated_forms_warn_and_work() -> None:
    model = walks.model("mlp")
    options = {"max_value": 0.9, "min_value": 0.1, "device": "cpu"}
    with pytest.warns(FutureWarning):
        ours, theirs = EMAModel(model, **options), training_utils.EMAModel(model, **options)  # type: ignore[arg-type]
    for _ in walks.walk(model, "mlp", 20):
        with pytest.warns(FutureWarning, match="model.parameters()"):
            ours.step(model)
        theirs.step(model)
    assert _same(ours, theirs)
    assert ours.use_ema_warmup


def test_an_unknown_option_is_not_ignored_silently() -> None:
    with pytest.warns(UserWarning, match="no option 'deacy'"):
        EMAModel(walks.model("mlp").parameters(), deacy=0.9)


def test_lists_that_do_not_fit_are_refused() -> None:
    """The origin stops at the end of the shorter list, without a word."""
    model = walks.model("mlp")
    ema = EMAModel(model.parameters(), 0.9)
    before = copy.deepcopy(ema.state_dict())
    for call in (ema.step, ema.copy_to, ema.restore):
        ema.store(model.parameters())
        with pytest.raises(ValueError, match="2 parameters were given; the averages were made of"):
            call(list(model.parameters())[:2])
        with pytest.raises(RuntimeError, match="parameter 0 has shape"):
            call(list(model.parameters())[::-1])
    assert ema.optimization_step == before["optimization_step"]
    assert _equal(ema.shadow_params, before["shadow_params"])
    assert ema.temp_stored_params is not None
    ema.temp_stored_params = None
    with pytest.raises(RuntimeError, match="nothing was stored"):
        ema.restore(model.parameters())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"decay": 1.5}, "between 0 and 1"),
        ({"min_decay": "low"}, "min_decay='low'"),
        ({"optimization_step": 1.0}, "optimization_step=1.0"),
        ({"update_after_step": None}, "update_after_step=None"),
        ({"use_ema_warmup": 1}, "use_ema_warmup=1"),
        ({"inv_gamma": "1"}, "inv_gamma='1'"),
        ({"power": None}, "power=None"),
        ({"shadow_params": ()}, "must be a list of tensors"),
        ({"shadow_params": [1.0]}, "must be a list of tensors"),
        ({"shadow_params": [torch.zeros(3)]}, "the averages were made of"),
    ],
)
def test_a_state_that_does_not_fit_is_a_value_error_and_changes_nothing(change: dict[str, Any], message: str) -> None:
    """The origin has taken what it read before."""
    model = walks.model("mlp")
    ema = EMAModel(model.parameters(), 0.9)
    before = copy.deepcopy(ema.state_dict())
    with pytest.raises(ValueError, match=message):
        ema.load_state_dict({"decay": 0.5, "optimization_step": 9, **change})
    assert {key: ema.state_dict()[key] for key in COUNTERS} == {key: before[key] for key in COUNTERS}


def test_a_whole_min_decay_can_be_loaded_again() -> None:
    """The origin takes min_decay=0, and then refuses its own state."""
    model = walks.model("mlp")
    with pytest.raises(ValueError, match="Invalid min_decay"):
        training_utils.EMAModel(model.parameters(), min_decay=0).load_state_dict({"min_decay": 0})
    ema = EMAModel(model.parameters(), min_decay=0)
    ema.load_state_dict(ema.state_dict())


def test_decays_out_of_range_are_refused_at_once() -> None:
    for options in ({"decay": 1.5}, {"decay": float("nan")}, {"min_decay": -1.0}):
        with pytest.raises(ValueError, match="between 0 and 1"):
            EMAModel(walks.model("mlp").parameters(), **options)


def test_what_is_not_finite_is_held() -> None:
    """The origin's average of it is NaN for ever."""
    model = nn.Linear(3, 2)
    ema = EMAModel(model.parameters(), 0.5, update_after_step=-5)
    before = ema.shadow_params[1].clone()
    with torch.no_grad():
        model.bias[1] = float("nan")
    with pytest.warns(RuntimeWarning, match="1 weights are NaN or Inf"):
        ema.step(model.parameters())
    assert torch.equal(ema.shadow_params[1], before)


def test_deepspeeds_partitions_are_refused() -> None:
    parameters = list(nn.Linear(2, 2).parameters())
    parameters[0].ds_tensor = None  # type: ignore[attr-defined]
    with pytest.raises(NotImplementedError, match="ZeRO-3"):
        EMAModel(parameters)


def test_it_needs_no_diffusers() -> None:
    code = "import sys; sys.modules['diffusers'] = None; import shardow.compat.diffusers as d, torch; d.EMAModel([torch.ones(2)]).step([torch.ones(2)])"
    subprocess.run([sys.executable, "-c", code], check=True)


# ---- saved models


def unet(seed: int = 0) -> Any:
    torch.manual_seed(seed)
    return UNet2DModel(
        sample_size=8, block_out_channels=(8, 16), layers_per_block=1, norm_num_groups=4, attention_head_dim=8,
        down_block_types=("DownBlock2D", "AttnDownBlock2D"), up_block_types=("AttnUpBlock2D", "UpBlock2D"),
    )  # fmt: skip


def _trained(cls: Any, model: Any, **options: Any) -> Any:
    ema = cls(model.parameters(), decay=0.9, update_after_step=1, model_cls=UNet2DModel, model_config=model.config, **options)
    for step in range(4):
        with torch.no_grad():
            for p in model.parameters():
                p.mul_(0.9 + 0.01 * step)
        ema.step(model.parameters())
    return ema


@pytest.mark.parametrize(
    ("writer", "reader"), [(EMAModel, training_utils.EMAModel), (training_utils.EMAModel, EMAModel), (EMAModel, EMAModel)]
)
def test_saved_models_go_both_ways_with_their_counters(writer: Any, reader: Any, tmp_path: Path) -> None:
    model = unet()
    ema = _trained(writer, model)
    ema.save_pretrained(str(tmp_path / "ours"))
    _trained(training_utils.EMAModel, unet()).save_pretrained(str(tmp_path / "theirs"))
    for name in ("config.json", "diffusion_pytorch_model.safetensors"):
        assert (tmp_path / "ours" / name).exists()
    assert len(os.listdir(tmp_path / "ours")) == 2
    configs = [json.loads((tmp_path / one / "config.json").read_text()) for one in ("ours", "theirs")]
    assert configs[0] == configs[1]
    found = reader.from_pretrained(str(tmp_path / "ours"), UNet2DModel, foreach=True)
    assert found.foreach
    assert _equal(found.shadow_params, ema.shadow_params)
    assert {key: found.state_dict()[key] for key in COUNTERS} == {key: ema.state_dict()[key] for key in COUNTERS}
    found.save_pretrained(str(tmp_path / "again"))
    loaded = UNet2DModel.from_pretrained(str(tmp_path / "again"))
    assert _equal(list(loaded.parameters()), ema.shadow_params)


def test_a_save_in_one_file_replaces_an_earlier_one_in_several(tmp_path: Path) -> None:
    unet(seed=1).save_pretrained(str(tmp_path), max_shard_size="50KB")
    assert len(os.listdir(tmp_path)) > 3
    sharded = EMAModel.from_pretrained(tmp_path, UNet2DModel, parameters=unet().parameters())
    assert _equal(sharded.shadow_params, list(unet(seed=1).parameters()))
    ema = _trained(EMAModel, unet())
    ema.save_pretrained(tmp_path)
    assert sorted(os.listdir(tmp_path)) == ["config.json", "diffusion_pytorch_model.safetensors"]
    assert _equal(list(UNet2DModel.from_pretrained(str(tmp_path)).parameters()), ema.shadow_params)


@pytest.mark.filterwarnings("ignore:averages in torch")
def test_averages_are_saved_in_the_dtypes_of_the_class(tmp_path: Path) -> None:
    model = unet().to(torch.bfloat16)
    _trained(EMAModel, model).save_pretrained(tmp_path)
    assert next(UNet2DModel.from_pretrained(str(tmp_path), torch_dtype="auto").parameters()).dtype == torch.float32


def test_saving_needs_a_class_and_a_config_that_fit(tmp_path: Path) -> None:
    model = unet()
    with pytest.raises(ValueError, match="model_cls="):
        EMAModel(model.parameters()).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="model_config="):
        EMAModel(model.parameters(), model_cls=UNet2DModel).save_pretrained(tmp_path)
    other = EMAModel(nn.Linear(2, 2).parameters(), model_cls=UNet2DModel, model_config=model.config)
    with pytest.raises(ValueError, match=r"has 144 parameters; there are averages of 2"):
        other.save_pretrained(tmp_path / "new")
    assert not (tmp_path / "new").exists()


class WithBuffer:
    """A diffusers model with a persistent buffer and tied weights, made where diffusers is there."""

    @staticmethod
    def cls() -> Any:
        from diffusers import ConfigMixin, ModelMixin
        from diffusers.configuration_utils import register_to_config

        class Tied(ModelMixin, ConfigMixin):  # type: ignore[misc]
            @register_to_config
            def __init__(self, width: int = 4) -> None:
                super().__init__()
                self.first, self.second = nn.Linear(width, width), nn.Linear(width, width)
                self.second.weight = self.first.weight
                self.register_buffer("scale", torch.full((2,), 7.0))

        return Tied


def test_buffers_and_tied_names_are_in_the_file(tmp_path: Path) -> None:
    """The origin cannot save tied weights at all."""
    cls = WithBuffer.cls()
    model = cls()
    with pytest.raises(RuntimeError, match="share memory"):
        training_utils.EMAModel(model.parameters(), model_cls=cls, model_config=model.config).save_pretrained(tmp_path)
    ema = EMAModel(model.parameters(), model_cls=cls, model_config=model.config)
    ema.save_pretrained(tmp_path)
    loaded = cls.from_pretrained(str(tmp_path), low_cpu_mem_usage=False)
    assert all(torch.equal(value, model.state_dict()[key]) for key, value in loaded.state_dict().items())


# ---- ranks


def _shard(kind: str, model: nn.Module) -> nn.Module:
    if kind == "ddp":
        return DistributedDataParallel(model)
    for block in (model.mid_block, *model.up_blocks):  # type: ignore[union-attr, misc]
        fully_shard(block)
    return fully_shard(model)


def _saved_by_ranks(kind: str, path: str) -> None:
    rank = torch.distributed.get_rank()
    plain = unet()
    theirs = training_utils.EMAModel(plain.parameters(), 0.9, model_cls=UNet2DModel, model_config=plain.config)
    config = plain.config
    model = _shard(kind, unet())
    ours = EMAModel(model.parameters(), 0.9, model_cls=UNet2DModel, model_config=config)
    for _ in range(3):
        with torch.no_grad():
            for p, whole in zip(model.parameters(), plain.parameters(), strict=True):
                getattr(p, "_local_tensor", p).mul_(0.9)
                whole.mul_(0.9)
        ours.step(model.parameters())
        theirs.step(plain.parameters())
    ours.store(model.parameters())
    assert all(
        getattr(a, "_local_tensor", a).numel() == getattr(b, "_local_tensor", b).numel()
        for a, b in zip(_stored(ours), model.parameters(), strict=True)
    )
    ours.copy_to(model.parameters())
    ours.restore(model.parameters())
    if kind != "ddp" or rank == 0:  # under DDP as scripts do, on one rank
        ours.save_pretrained(path)
    torch.distributed.barrier()
    assert _equal(list(UNet2DModel.from_pretrained(path).parameters()), theirs.shadow_params)
    found = EMAModel.from_pretrained(path, UNet2DModel, parameters=model.parameters())
    assert found.optimization_step == 3
    found.step(model.parameters())
    ours.step(model.parameters())
    pairs = zip(found.shadow_params, ours.shadow_params, strict=True)
    assert all(torch.equal(getattr(a, "_local_tensor", a), getattr(b, "_local_tensor", b)) for a, b in pairs)


def _stored(ema: EMAModel) -> list[torch.Tensor]:
    assert ema.temp_stored_params is not None
    return ema.temp_stored_params


@pytest.mark.parametrize(("kind", "world"), [("fsdp2", 2), *([("ddp", 2), ("fsdp2", 4)] if os.environ.get("SHARDOW_ALL") else [])])
def test_ranks_save_what_one_process_would(kind: str, world: int, tmp_path: Path) -> None:
    ranks.run(world, _saved_by_ranks, kind, str(tmp_path))
