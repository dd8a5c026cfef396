"""Lightning with averages on several ranks, DDP, FSDP and ModelParallel: killed and resumed, at other world sizes, and
the recipe.
"""

from __future__ import annotations

import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import framework_ranks as ranks
import pytest
import torch
from launched import equal, killed_after, launched
from safetensors.torch import load_file
from small_lightning import Net, Sharded, batches, output, trainer_of

pytest.importorskip("lightning")
from examples import lightning_fit
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint

from shardow.errors import CorruptError
from shardow.integrations.lightning import EMACallback

#: Without FSDP1's full state dicts, with which torch itself crashes on CPUs. Each takes six processes that import
#: Lightning.
KINDS = ["fsdp2", *(["ddp", "fsdp1"] if os.environ.get("SHARDOW_ALL") else [])]


def fit(
    kind: str, out: Path, world: int = 1, epochs: int = 3, resume: bool = False, probe: Callback | None = None
) -> tuple[Any, Any]:
    module, callback = (Sharded if kind == "fsdp2" else Net)(), EMACallback([0.5, 0.9], use=0.9)
    saves = ModelCheckpoint(out, "{epoch}", save_top_k=-1)
    trainer = trainer_of(kind, callback, *([probe] if probe else []), saves, world=world, epochs=epochs)
    last = max(out.glob("epoch=*.ckpt"), default=None) if resume else None
    trainer.fit(module, batches(), batches(1), ckpt_path=last)
    return module, callback


def trained(
    kind: str, out: Path, world: int, resume: bool = False, dies_after: int | None = None
) -> tuple[dict[str, torch.Tensor], float]:
    """The averages in the end, and what the last validation computed."""
    with launched(), killed_after(dies_after):
        module, callback = fit(kind, out, world, resume=resume)
        return callback.ema.full_state_dict(0.9), module.seen[-1]


@pytest.mark.parametrize("kind", KINDS)
def test_killed_and_resumed_the_averages_are_those_of_a_run_that_nothing_stopped(kind: str, tmp_path: Path) -> None:
    (straight, seen), (_, other) = ranks.run(2, trained, kind, tmp_path / "straight", 2)
    averaged = Net()
    averaged.load_state_dict(straight)
    assert seen == other == pytest.approx(output(averaged), abs=1e-6)
    ranks.run(2, trained, kind, tmp_path / "killed", 2, False, 7, may_die=True)
    assert sorted(one.name for one in (tmp_path / "killed").iterdir()) == ["epoch=0.ckpt"]
    assert equal(ranks.run(2, trained, kind, tmp_path / "killed", 2, True)[0][0], straight)


class Begun(Callback):
    """What the averages are after Lightning and EMACallback have restored all."""

    def __init__(self, averages: Callable[[], Any]) -> None:
        self.averages = averages

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        ema = self.averages()
        self.step, self.found = ema.step, ema.full_state_dict(0.9)


def resumed(kind: str, out: Path, world: int) -> tuple[int, dict[str, torch.Tensor]]:
    with launched():
        begun = Begun(lambda: next(one for one in begun.trainer.callbacks if isinstance(one, EMACallback)).ema)
        begun.setup = lambda trainer, *_, **__: setattr(begun, "trainer", trainer)  # type: ignore[method-assign]
        fit(kind, out, world, epochs=4, resume=True, probe=begun)
        return begun.step, begun.found


@pytest.mark.parametrize(("kind", "world"), [("ddp", 3), ("ddp", 1), ("fsdp1", 3), ("fsdp2", 3), ("fsdp2", 1)])
def test_at_another_world_size_the_averages_resumed_are_those_that_were_saved(
    kind: str, world: int, tmp_path: Path
) -> None:
    there, _ = ranks.run(2, trained, kind, tmp_path, 2)[0]
    step, here = ranks.run(world, resumed, kind, tmp_path, world)[0]
    assert step == 12
    assert equal(here, there)


def resumed_from_two_steps(out: Path) -> str:
    """From weights of one epoch beside averages of the next, as a save leaves them that is killed in between."""
    with launched():
        fit("fsdp2", out, epochs=2)
        first, second = (out / f"epoch={epoch}.ckpt" for epoch in range(2))
        shutil.rmtree(first / "averages.safetensors")
        (second / "averages.safetensors").rename(first / "averages.safetensors")
        shutil.rmtree(second)
        with pytest.raises(CorruptError) as refused:
            fit("fsdp2", out, resume=True)
        return str(refused.value)


def test_averages_of_a_later_step_than_the_weights_are_refused(tmp_path: Path) -> None:
    [text] = ranks.run(1, resumed_from_two_steps, tmp_path)
    assert text.endswith("epoch=0.ckpt is of step 8, averages of 16: a save was interrupted")


def recipe(out: Path) -> float:
    with launched():
        return lightning_fit.train(2, out, enable_progress_bar=False, enable_model_summary=False)


def test_the_recipe_learns_and_goes_on_after_a_stop(tmp_path: Path) -> None:
    assert ranks.run(2, recipe, tmp_path / "straight")[0] > 0.7
    shutil.copytree(tmp_path / "straight" / "epoch=0.ckpt", tmp_path / "parts" / "epoch=0.ckpt")
    (tmp_path / "parts" / "epoch=1.ckpt").mkdir()  # where a save was killed
    ranks.run(2, recipe, tmp_path / "parts")
    found = [load_file(tmp_path / one / "model" / "model.safetensors") for one in ("straight", "parts")]
    assert equal(*found)


class Written(Callback):
    """What the averages are in the end, in a process that Lightning starts."""

    def __init__(self, out: Path) -> None:
        self.out = out

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        callback = next(one for one in trainer.callbacks if isinstance(one, EMACallback))
        torch.save(
            (callback.ema.step, pl_module.seen, callback.ema.full_state_dict()), self.out / f"{trainer.global_rank}.pt"
        )


def test_where_lightning_starts_the_ranks_the_module_that_comes_back_has_the_averages(tmp_path: Path) -> None:
    """As in a notebook. With ddp_spawn the callback is pickled, and torch's own threads abort a rank now and then when
    it ends.
    """
    pickle.loads(pickle.dumps(EMACallback(0.9)))
    module, quiet = (
        Net(),
        {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "num_sanity_val_steps": 0},
    )
    trainer = Trainer(
        accelerator="cpu", devices=2, strategy="ddp_fork", max_epochs=2, enable_checkpointing=False,
        callbacks=[EMACallback(0.9), Written(tmp_path)], **quiet,
    )  # fmt: skip
    with patch.dict(os.environ):  # Lightning leaves its port there
        os.environ.pop("MASTER_PORT", None)
        trainer.fit(module, batches(), batches(2))
    (step, seen, averages), (_, other, _) = (torch.load(tmp_path / f"{rank}.pt") for rank in range(2))
    assert step == 8
    assert seen == other
    assert len(seen) == 2
    assert equal(module.state_dict(), averages)
