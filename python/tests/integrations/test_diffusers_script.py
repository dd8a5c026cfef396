"""diffusers' training scripts with EMAModel of shardow.compat: as they are, but for the import; killed, resumed,
evaluated, exported.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import framework_ranks as ranks
import pytest
import torch
from launched import killed_after, launched

pytest.importorskip("diffusers")

from shardow.compat.diffusers import EMAModel
from shardow.integrations.accelerate import last_state, save_state

Tensors = list[torch.Tensor]


def unet() -> Any:
    from diffusers import UNet2DModel

    torch.manual_seed(0)
    return UNet2DModel(
        sample_size=8, in_channels=1, out_channels=1, block_out_channels=(8,), down_block_types=["DownBlock2D"],
        up_block_types=["UpBlock2D"], layers_per_block=1, norm_num_groups=4,
    )  # fmt: skip


def trained(out: Path, dies_after: int | None = None) -> tuple[Tensors, Tensors, list[bool]]:
    """The averages that training began with, those in the end, and whether an evaluation had them and left no trace."""
    from accelerate import Accelerator

    with launched(), killed_after(dies_after):
        accelerator, net = Accelerator(cpu=True), unet()
        model, optimizer = accelerator.prepare(net, torch.optim.AdamW(net.parameters(), 1e-2))
        ema = EMAModel(net.parameters(), decay=0.9, model_cls=type(net), model_config=net.config)

        def save(models: Any, weights: Any, folder: str) -> None:
            if accelerator.is_main_process:
                ema.save_pretrained(os.path.join(folder, "unet_ema"))

        def load(models: Any, folder: str) -> None:
            ema.load_state_dict(EMAModel.from_pretrained(os.path.join(folder, "unet_ema"), type(net)).state_dict())

        accelerator.register_save_state_pre_hook(save)
        accelerator.register_load_state_pre_hook(load)
        if state := last_state(out):
            accelerator.load_state(state)
        begun = [one.clone() for one in ema.shadow_params]
        for step in range(3 if state else 0, 6):
            images = torch.randn(
                2, 1, 8, 8, generator=torch.Generator().manual_seed(100 * step + accelerator.process_index)
            )
            accelerator.backward((model(images, 1).sample - images).square().mean())
            optimizer.step()
            optimizer.zero_grad()
            ema.step(net.parameters())
            if step == 2:
                save_state(accelerator, out / "step-3")
        return begun, [one.clone() for one in ema.shadow_params], evaluated(net, ema, out)


@torch.no_grad()
def evaluated(net: Any, ema: EMAModel, out: Path) -> list[bool]:
    before = [p.clone() for p in net.parameters()]
    ema.store(net.parameters())
    ema.copy_to(net.parameters())
    inside = [p.clone() for p in net.parameters()]
    ema.restore(net.parameters())
    if torch.distributed.get_rank() == 0:
        ema.save_pretrained(str(out / "model"))
    torch.distributed.barrier()
    opened = type(net).from_pretrained(out / "model", local_files_only=True)
    return [equal(inside, [*opened.parameters()]), not equal(inside, before), equal(before, [*net.parameters()])]


def equal(one: Tensors, other: Tensors) -> bool:
    return len(one) == len(other) and all(map(torch.equal, one, other))


def test_a_script_goes_on_bit_for_bit_after_a_kill_and_on_other_numbers_of_ranks_with_what_was_saved(
    tmp_path: Path,
) -> None:
    straight = ranks.run(2, trained, tmp_path / "straight")
    assert [checks for *_, checks in straight] == [[True] * 3] * 2  # the evaluation had what from_pretrained() opens
    ranks.run(2, trained, tmp_path / "killed", 5, may_die=True)
    assert sorted(os.listdir(tmp_path / "killed")) == ["step-3"]
    (begun, killed, _), _ = ranks.run(2, trained, tmp_path / "killed")
    assert equal(killed, straight[0][1])
    assert not equal(begun, straight[0][0])
    for one, *_ in ranks.run(3, trained, tmp_path / "killed"):
        assert equal(one, begun)
