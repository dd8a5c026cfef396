"""Lightning with averages on one device: resumed, validated, saved, left in the module.

What Lightning's own tests of its weight averaging ask is asked here too; of several ranks and of sharded models in
test_lightning_ranks.py.
"""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from launched import equal
from small_lightning import Net, Watching, batches, output, trainer_of
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

import shardow

pytest.importorskip("lightning")
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import ModelCheckpoint

from shardow.integrations.lightning import EMACallback


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


DECAYS = [0.9, 0.99, 0.999, 0.9999]


def test_averages_are_those_of_the_formula_with_an_iterable_dataset_and_accumulation() -> None:
    class Stream(IterableDataset[Any]):
        def __iter__(self) -> Any:
            return iter(batches().dataset)

    class ByHand(Callback):
        def on_train_batch_start(self, trainer: Any, pl_module: Any, *_: Any) -> None:
            self.update(trainer, pl_module)

        def update(self, trainer: Any, pl_module: Any) -> None:
            weight = pl_module.layers[0].weight.detach().double()
            if trainer.global_step == 0:
                self.step, self.averages = 0, [weight.clone() for _ in DECAYS]
            elif trainer.global_step > self.step:
                self.step = trainer.global_step
                self.averages = [one.lerp(weight, 1 - decay) for one, decay in zip(self.averages, DECAYS, strict=True)]

        on_train_end = update

    callback, by_hand = EMACallback(DECAYS, use=0.99), ByHand()
    trainer_of("one", callback, by_hand, epochs=2, accumulate_grad_batches=2).fit(Net(), DataLoader(Stream(), 4))
    assert callback.ema is not None
    assert callback.ema.step == by_hand.step == 8
    for decay, average in zip(DECAYS, by_hand.averages, strict=True):
        found = callback.ema.full_state_dict(decay)["layers.0.weight"].double()
        torch.testing.assert_close(found, average, rtol=0, atol=1e-6)


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


@pytest.mark.parametrize(("crash", "every"), [(1, 1), (2, 1), (2, 3)])
def test_a_crash_is_resumed_as_if_it_had_not_been(crash: int, every: int, tmp_path: Path) -> None:
    """Steps 8 and 16, after which it is saved, lie between updates of every third step."""
    straight = EMACallback(0.9, update_every=every)
    trainer_of("one", straight).fit(Net(), batches())
    with pytest.raises(RuntimeError, match="crash"):
        trainer_of("one", EMACallback(0.9, update_every=every), ModelCheckpoint(tmp_path, "last")).fit(
            Net(crash=crash), batches()
        )
    callback = EMACallback(0.9, update_every=every)
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


@pytest.mark.parametrize(
    ("options", "copied", "averaged"),
    [
        ({}, [], list(range(1, 25))),
        ({"update_every": 5}, [], [5, 10, 15, 20]),
        ({"start_step": 10}, [*range(1, 11)], [*range(11, 25)]),
        ({"start_step": 10, "update_every": 5}, [*range(1, 11)], [15, 20]),
        ({"epochs": lambda epoch: epoch >= 1}, [], [16, 24]),
    ],
    ids=["all", "every fifth", "late", "late and every fifth", "late epochs"],
)
def test_updates_come_after_these_steps(options: dict[str, Any], copied: list[int], averaged: list[int]) -> None:
    class Watched(Net):
        """Averages and weights as each batch, and each epoch, finds them; by the number of steps before it."""

        def note(self) -> None:
            weights, averages = (
                one["layers.0.weight"].clone() for one in (self.state_dict(), callback.ema.full_state_dict())
            )  # type: ignore[union-attr]
            self.noted[self.trainer.global_step] = (weights, averages)

        def on_train_batch_start(self, batch: Any, index: int) -> None:
            self.note()

        def on_train_end(self) -> None:
            self.note()

    callback, module = EMACallback(0.9, **options), Watched()
    module.noted = {}
    trainer_of("one", callback).fit(module, batches())
    now = [(step, *module.noted[step], module.noted[step - 1][1]) for step in range(1, 25)]
    assert [step for step, _, averages, before in now if not torch.equal(averages, before)] == copied + averaged
    assert [step for step, weights, averages, _ in now if torch.equal(averages, weights)] == copied


def test_a_layer_that_configure_model_makes_is_averaged() -> None:
    class Late(Net):
        def configure_model(self) -> None:
            if len(self.layers) == 3:
                self.layers.append(nn.Linear(3, 2))

    callback = EMACallback(0.9)
    trainer_of("one", callback).fit(Late(), batches())
    assert callback.ema is not None
    assert "layers.3.weight" in callback.ema.names


def test_a_module_that_cannot_be_copied_is_averaged() -> None:
    class Single(Net):
        """With a handle of the operating system's, as a data module or a loader has one."""

        def __init__(self) -> None:
            super().__init__()
            self.held = threading.Lock()

        def __deepcopy__(self, memo: Any) -> Any:
            raise AssertionError("copied")

    callback = EMACallback(0.9)
    trainer_of("one", callback, epochs=1).fit(Single(), batches(), batches(1))
    assert callback.ema is not None
    assert callback.ema.step == 8


def test_a_checkpoint_without_averages_is_not_resumed_in_silence(tmp_path: Path) -> None:
    trainer_of("one", Callback(), ModelCheckpoint(tmp_path, "last")).fit(Net(), batches())
    with pytest.raises(shardow.errors.NotFoundError, match=r"last.ckpt has no averages.*missing='from_model'"):
        trainer_of("one", EMACallback(0.9), epochs=4).fit(Net(), batches(), ckpt_path=tmp_path / "last.ckpt")
    callback = EMACallback(0.9, missing="from_model")
    with pytest.warns(UserWarning, match="begin anew from the checkpoint's weights"):
        trainer_of("one", callback, epochs=4).fit(Net(), batches(), ckpt_path=tmp_path / "last.ckpt")
    assert callback.ema is not None
    assert callback.ema.step == 8


def test_two_optimizers_count_once() -> None:
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


def test_steps_after_training_are_not_averaged() -> None:
    class Kept(Net):
        def configure_optimizers(self) -> Any:
            self.optimizer = super().configure_optimizers()
            return self.optimizer

    callback, module = EMACallback(0.9), Kept()
    trainer_of("one", callback, epochs=1).fit(module, batches(2))
    for weight in module.parameters():
        weight.grad = torch.ones_like(weight)
    module.optimizer.step()
    assert callback.ema is not None
    assert callback.ema.step == 2
