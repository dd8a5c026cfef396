"""Lightning with averages: one device, DDP, FSDP and ModelParallel; killed and resumed, validated, saved, left in the module.

What Lightning's own tests of its weight averaging ask is asked here too, and of sharded models, which it cannot average.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import ranks
import torch
from launched import equal, killed_after, launched
from safetensors.torch import load_file
from small_lightning import Net, Sharded, Watching, batches, output, trainer_of
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

import shardow

pytest.importorskip("lightning")
from examples import lightning_fit
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import ModelCheckpoint

from shardow.integrations.lightning import EMACallback

#: Without FSDP1's full state dicts, with which torch itself crashes on CPUs. Each takes six processes that import Lightning.
KINDS = ["fsdp2", *(["ddp", "fsdp1"] if os.environ.get("SHARDOW_ALL") else [])]


def fit(kind: str, out: Path, world: int = 1, epochs: int = 3, resume: bool = False, probe: Callback | None = None) -> tuple[Any, Any]:
    module, callback = (Sharded if kind == "fsdp2" else Net)(), EMACallback([0.5, 0.9], use=0.9)
    saves = ModelCheckpoint(out, "{epoch}", save_top_k=-1)
    trainer = trainer_of(kind, callback, *([probe] if probe else []), saves, world=world, epochs=epochs)
    last = max(out.glob("epoch=*.ckpt"), default=None) if resume else None
    trainer.fit(module, batches(), batches(1), ckpt_path=last)
    return module, callback


# ---- several ranks


def trained(kind: str, out: Path, world: int, resume: bool = False, dies_after: int | None = None) -> dict[str, torch.Tensor]:
    with launched(), killed_after(dies_after):
        _, callback = fit(kind, out, world, resume=resume)
        return callback.ema.full_state_dict(0.9)


@pytest.mark.parametrize("kind", KINDS)
def test_killed_and_resumed_the_averages_are_those_of_a_run_that_nothing_stopped(kind: str, tmp_path: Path) -> None:
    straight = ranks.run(2, trained, kind, tmp_path / "straight", 2)[0]
    ranks.run(2, trained, kind, tmp_path / "killed", 2, False, 7, may_die=True)
    assert sorted(one.name for one in (tmp_path / "killed").iterdir()) == ["epoch=0.ckpt"]
    assert equal(ranks.run(2, trained, kind, tmp_path / "killed", 2, True)[0], straight)


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
def test_at_another_world_size_the_averages_resumed_are_those_that_were_saved(kind: str, world: int, tmp_path: Path) -> None:
    there = ranks.run(2, trained, kind, tmp_path, 2)[0]
    step, here = ranks.run(world, resumed, kind, tmp_path, world)[0]
    assert step == 12
    assert equal(here, there)


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


# ---- on one rank


@pytest.mark.parametrize("batch_norm", [False, True])
def test_validation_sees_the_averages_and_checkpoints_the_weights(batch_norm: bool, tmp_path: Path) -> None:
    callback, watching, module = EMACallback(0.9, buffers="average", leave="weights"), Watching(), Net(batch_norm)
    trainer = trainer_of("one", callback, watching, ModelCheckpoint(tmp_path, "{epoch}", save_top_k=-1))
    trainer.fit(module, batches(), batches(1))
    assert callback.ema is not None
    assert (callback.ema.step, trainer.global_step) == (24, 24)
    averaged = Net(batch_norm)
    averaged.load_state_dict(callback.ema.full_state_dict())
    assert module.seen[-1] == watching.outputs["end of epoch"] == output(averaged) != output(module)
    assert watching.outputs["saved"] == watching.outputs["training"] == output(module)
    saved = torch.load(max(tmp_path.glob("*.ckpt")))
    assert equal(saved["state_dict"], module.state_dict())
    assert equal(saved["averages"]["averages"], callback.ema.full_state_dict(complete=False))


def test_averages_are_those_of_the_formula_with_an_iterable_dataset_and_accumulation(tmp_path: Path) -> None:
    class Stream(IterableDataset[Any]):
        def __iter__(self) -> Any:
            return iter(batches().dataset)

    class ByHand(Callback):
        def on_train_batch_start(self, trainer: Any, pl_module: Any, *_: Any) -> None:
            self.update(trainer, pl_module)

        def update(self, trainer: Any, pl_module: Any) -> None:
            weight = pl_module.layers[0].weight.detach().double()
            if trainer.global_step == 0:
                self.step, self.average = 0, weight.clone()
            elif trainer.global_step > self.step:
                self.step, self.average = trainer.global_step, self.average.lerp(weight, 0.1)

        on_train_end = update

    callback, by_hand = EMACallback(0.9), ByHand()
    trainer_of("one", callback, by_hand, epochs=2, accumulate_grad_batches=2).fit(Net(), DataLoader(Stream(), 4))
    assert callback.ema is not None
    assert callback.ema.step == by_hand.step == 8
    torch.testing.assert_close(callback.ema.full_state_dict()["layers.0.weight"].double(), by_hand.average, rtol=0, atol=1e-6)


def test_after_training_the_module_has_the_averages_and_opens_elsewhere(tmp_path: Path) -> None:
    callback, module = EMACallback(0.9), Net()
    trainer = trainer_of("one", callback)
    trainer.fit(module, batches())
    assert callback.ema is not None
    averages = callback.ema.full_state_dict()
    assert equal(module.state_dict(), averages)
    trainer.save_checkpoint(tmp_path / "model.ckpt")
    assert equal(Net.load_from_checkpoint(tmp_path / "model.ckpt").state_dict(), averages)
    assert "averages" not in torch.load(tmp_path / "model.ckpt")


@pytest.mark.parametrize("run", ["validate", "test", "predict"])
def test_a_run_of_a_checkpoint_alone_uses_its_averages(run: str, tmp_path: Path) -> None:
    callback = EMACallback(0.9)
    trainer_of("one", callback, ModelCheckpoint(tmp_path, "last")).fit(Net(), batches())
    module = Net()
    trainer = trainer_of("one", EMACallback(0.9))
    getattr(trainer, run)(module, batches(1), ckpt_path=tmp_path / "last.ckpt")
    averaged = Net()
    averaged.load_state_dict(callback.ema.full_state_dict())  # type: ignore[union-attr]
    assert module.seen == [output(averaged)]


@pytest.mark.parametrize("crash", [1, 2])
def test_a_crash_is_resumed_as_if_it_had_not_been(crash: int, tmp_path: Path) -> None:
    straight = EMACallback(0.9)
    trainer_of("one", straight).fit(Net(), batches())
    with pytest.raises(RuntimeError, match="crash"):
        trainer_of("one", EMACallback(0.9), ModelCheckpoint(tmp_path, "last")).fit(Net(crash=crash), batches())
    callback = EMACallback(0.9)
    trainer_of("one", callback).fit(Net(), batches(), ckpt_path=tmp_path / "last.ckpt")
    assert equal(callback.ema.full_state_dict(), straight.ema.full_state_dict())  # type: ignore[union-attr]


def test_a_validation_that_fails_leaves_the_weights_and_saves_them(tmp_path: Path) -> None:
    class Failing(Net):
        def validation_step(self, batch: Any, index: int) -> None:
            raise RuntimeError("in the middle of a validation")

    module, watching = Failing(), Watching()
    trainer = trainer_of("one", EMACallback(0.9), watching, ModelCheckpoint(tmp_path, "last", save_on_exception=True))
    with pytest.raises(RuntimeError, match="in the middle"):
        trainer.fit(module, batches(), batches(1))
    saved = torch.load(next(tmp_path.glob("*.ckpt")))
    assert equal(saved["state_dict"], module.state_dict())
    assert not equal(saved["state_dict"], saved["averages"]["averages"])


def test_a_checkpoint_in_the_middle_of_a_validation_is_refused(tmp_path: Path) -> None:
    class Saving(Net):
        def validation_step(self, batch: Any, index: int) -> None:
            self.trainer.save_checkpoint(tmp_path / "wrong.ckpt")

    with pytest.raises(ValueError, match="swapped"):
        trainer_of("one", EMACallback(0.9)).fit(Saving(), batches(), batches(1))
    assert not (tmp_path / "wrong.ckpt").exists()


@pytest.mark.parametrize("crash", [None, 4])
def test_after_chosen_epochs_it_is_stochastic_weight_averaging(crash: int | None, tmp_path: Path) -> None:
    weights: list[dict[str, torch.Tensor]] = []

    class Chosen(Callback):
        def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
            if trainer.current_epoch in (1, 3, 4):
                weights.append({name: one.detach().double() for name, one in pl_module.state_dict().items()})

    def averages() -> EMACallback:
        return EMACallback(shardow.schedules.mean(), epochs=lambda epoch: epoch in (1, 3, 4))

    if crash is not None:
        with pytest.raises(RuntimeError, match="crash"):
            trainer_of("one", averages(), ModelCheckpoint(tmp_path, "last"), epochs=5).fit(Net(crash=crash), batches())
    callback = averages()
    trainer_of("one", callback, Chosen(), epochs=5).fit(Net(), batches(), ckpt_path=crash and tmp_path / "last.ckpt")
    assert callback.ema is not None
    assert callback.ema.step == 3
    if crash is None:
        for name, average in callback.ema.full_state_dict().items():
            torch.testing.assert_close(average.double(), sum(one[name] for one in weights) / 3, rtol=0, atol=1e-6)
    else:
        straight = averages()
        trainer_of("one", straight, epochs=5).fit(Net(), batches())
        assert equal(callback.ema.full_state_dict(), straight.ema.full_state_dict())  # type: ignore[union-attr]


def test_updates_begin_late_and_come_every_few_steps_if_asked(tmp_path: Path) -> None:
    callback = EMACallback(0.9, start_step=10, update_every=5)
    trainer_of("one", callback).fit(Net(), batches())
    assert callback.ema is not None
    assert callback.ema.stats()["updates"] == 2  # after steps 15 and 20


def test_a_layer_that_configure_model_makes_is_averaged(tmp_path: Path) -> None:
    class Late(Net):
        def configure_model(self) -> None:
            if len(self.layers) == 3:
                self.layers.append(nn.Linear(3, 2))

    callback = EMACallback(0.9)
    trainer_of("one", callback).fit(Late(), batches())
    assert callback.ema is not None
    assert "layers.3.weight" in callback.ema.names


def test_a_checkpoint_without_averages_is_not_resumed_in_silence(tmp_path: Path) -> None:
    trainer_of("one", Callback(), ModelCheckpoint(tmp_path, "last")).fit(Net(), batches())
    with pytest.raises(shardow.errors.NotFoundError, match=r"last.ckpt has no averages.*missing='from_model'"):
        trainer_of("one", EMACallback(0.9), epochs=4).fit(Net(), batches(), ckpt_path=tmp_path / "last.ckpt")
    callback = EMACallback(0.9, missing="from_model")
    with pytest.warns(UserWarning, match="begin anew from its weights"):
        trainer_of("one", callback, epochs=4).fit(Net(), batches(), ckpt_path=tmp_path / "last.ckpt")
    assert callback.ema is not None
    assert callback.ema.step == 8


def test_two_optimizers_count_once(tmp_path: Path) -> None:
    class Two(Net):
        automatic_optimization = False

        def configure_optimizers(self) -> Any:
            return [torch.optim.SGD(self.layers[one].parameters(), 0.1) for one in (0, 2)]

        def training_step(self, batch: Any, index: int) -> None:
            for one in self.optimizers():
                one.zero_grad()
                self.manual_backward(self.layers(batch[0]).square().mean())
                one.step()

    callback = EMACallback(0.9)
    trainer_of("one", callback, epochs=1).fit(Two(), batches())
    assert callback.ema is not None
    assert callback.ema.step == 8


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(ValueError, match="leave='both'; it must be one of"):
        EMACallback(leave="both")  # type: ignore[arg-type]
