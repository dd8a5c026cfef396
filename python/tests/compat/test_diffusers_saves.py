"""diffusers' EMAModel as a saved model: both ways between the origin and us, by one process or by ranks."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import ranks
import torch
from diffusers_models import COUNTERS, equal
from safetensors.torch import load_file, save_file
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


def unet(seed: int = 0) -> Any:
    torch.manual_seed(seed)
    return UNet2DModel(
        sample_size=8, block_out_channels=(8, 16), layers_per_block=1, norm_num_groups=4, attention_head_dim=8,
        down_block_types=("DownBlock2D", "AttnDownBlock2D"), up_block_types=("AttnUpBlock2D", "UpBlock2D"),
    )  # fmt: skip


def _trained(cls: Any, model: Any, **options: Any) -> Any:
    ema = cls(
        model.parameters(), decay=0.9, update_after_step=1, model_cls=UNet2DModel, model_config=model.config, **options
    )
    for step in range(4):
        with torch.no_grad():
            for p in model.parameters():
                p.mul_(0.9 + 0.01 * step)
        ema.step(model.parameters())
    return ema


@pytest.mark.parametrize(
    ("writer", "reader"),
    [(EMAModel, training_utils.EMAModel), (training_utils.EMAModel, EMAModel), (EMAModel, EMAModel)],
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
    assert equal(found.shadow_params, ema.shadow_params)
    assert {key: found.state_dict()[key] for key in COUNTERS} == {key: ema.state_dict()[key] for key in COUNTERS}
    found.save_pretrained(str(tmp_path / "again"))
    loaded = UNet2DModel.from_pretrained(str(tmp_path / "again"))
    assert equal(list(loaded.parameters()), ema.shadow_params)


def test_a_save_in_one_file_replaces_an_earlier_one_in_several(tmp_path: Path) -> None:
    unet(seed=1).save_pretrained(str(tmp_path), max_shard_size="50KB")
    assert len(os.listdir(tmp_path)) > 3
    sharded = EMAModel.from_pretrained(tmp_path, UNet2DModel, parameters=unet().parameters())
    assert equal(sharded.shadow_params, list(unet(seed=1).parameters()))
    others = ["diffusion_pytorch_model-fp16-of-unet.safetensors", "diffusion_pytorch_model-1-of-2.bin"]
    for name in others:
        (tmp_path / name).touch()
    ema = _trained(EMAModel, unet())
    ema.save_pretrained(tmp_path)
    assert sorted(os.listdir(tmp_path)) == sorted(["config.json", "diffusion_pytorch_model.safetensors", *others])
    assert equal(list(UNet2DModel.from_pretrained(str(tmp_path)).parameters()), ema.shadow_params)


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
    with pytest.raises(ValueError, match=r"has 144 parameters; 2 averages"):
        other.save_pretrained(tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_a_file_that_lacks_an_average_is_refused(tmp_path: Path) -> None:
    model = unet()
    _trained(EMAModel, model).save_pretrained(tmp_path)
    file = tmp_path / "diffusion_pytorch_model.safetensors"
    tensors = load_file(file)
    del tensors["conv_in.weight"]
    save_file(tensors, file)
    with pytest.raises(ValueError, match=r"has no 'conv_in\.weight'; is it another model's"):
        EMAModel.from_pretrained(tmp_path, UNet2DModel, parameters=model.parameters())


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
    assert equal(list(UNet2DModel.from_pretrained(path).parameters()), theirs.shadow_params)
    found = EMAModel.from_pretrained(path, UNet2DModel, parameters=model.parameters())
    assert found.optimization_step == 3
    found.step(model.parameters())
    ours.step(model.parameters())
    pairs = zip(found.shadow_params, ours.shadow_params, strict=True)
    assert all(torch.equal(getattr(a, "_local_tensor", a), getattr(b, "_local_tensor", b)) for a, b in pairs)


def _stored(ema: EMAModel) -> list[torch.Tensor]:
    assert ema.temp_stored_params is not None
    return ema.temp_stored_params


@pytest.mark.parametrize(
    ("kind", "world"), [("fsdp2", 2), *([("ddp", 2), ("fsdp2", 4)] if os.environ.get("SHARDOW_ALL") else [])]
)
def test_ranks_save_what_one_process_would(kind: str, world: int, tmp_path: Path) -> None:
    ranks.run(world, _saved_by_ranks, kind, str(tmp_path))
