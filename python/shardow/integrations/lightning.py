"""Averages under Lightning's Trainer, one device, DDP, FSDP or ModelParallel: one callback.

    trainer = Trainer(callbacks=[EMACallback(0.999), ModelCheckpoint(...)], ...)
    trainer.fit(module, ckpt_path="last")

Validation sees the averages, the module's own hooks at its end too; ModelCheckpoint, which saves right after, the
weights. A checkpoint that is one file has the averages under "averages", one that is a directory in
averages.safetensors, where each rank writes its part.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.strategies import Strategy
from lightning.pytorch.trainer.states import TrainerFn

from shardow.base.checks import one_of, warn
from shardow.ema import EMA
from shardow.errors import CorruptError, Error
from shardow.integrations.common import Keeping, Missing

__all__ = ["EMACallback"]

KEY, FILE = "averages", "averages.safetensors"


class EMACallback(Keeping, Callback):
    """``callback.ema`` from the beginning of training on; after it the module has the averages, for test(), predict()
    and export.

    They begin where everything has been restored, which is later for sharded models. One update follows each optimizer
    step (of several optimizers: of the last one); those that a GradScaler skips are not counted. validate(), test() and
    predict() of a checkpoint that has averages use them.

    Args:
        decay, options: of shardow.EMA; ``update_every`` and ``start_step`` among them.
        use: which of several decays is evaluated and left in the module.
        epochs: update after those epochs for which this is true, in place of steps: ``lambda epoch: epoch >= 3``, with
            ``decay=shardow.schedules.mean()``, is stochastic weight averaging.
        leave: "averages" or "weights": what the module has after fit().
        missing: "error": fit() can't go on from a checkpoint without averages; "from_model": they begin anew there,
            with a warning.
    """

    def __init__(
        self, decay: Any = 0.9999, *, use: Any = None, epochs: Callable[[int], bool] | None = None,
        leave: Literal["averages", "weights"] = "averages", missing: Missing = "error", **options: Any,
    ) -> None:  # fmt: skip
        self.keep(decay, use, missing, options)
        self.epochs, self.leave = epochs, one_of("leave", leave, ("averages", "weights"))
        self._found: Any = None  # of the checkpoint that is being loaded
        self._training = self._swapped = False

    # ---- training

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.ema = EMA(trainer.strategy.model or pl_module, **self.options)
        if trainer.ckpt_path is not None:
            self._load(self.ema, trainer)
        if self.epochs is None:
            self.follow(*trainer.optimizers)
        self._training, self._found = True, None
        trainer.strategy.save_checkpoint = self._beside(trainer.strategy)  # type: ignore[method-assign]

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        # Counts each epoch once, though a resume comes here again.
        if self.epochs is not None and self.epochs(trainer.current_epoch):
            assert self.ema is not None
            self.ema.update(step=sum(self.epochs(one) for one in range(trainer.current_epoch + 1)))

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """After the last checkpoint."""
        if self._training and self.ema is not None and self.leave == "averages":
            self.ema.copy_to(trainer.strategy.model or pl_module, self.use)

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        trainer.strategy.__dict__.pop("save_checkpoint", None)
        self.let_go()
        self._training, self._found = False, None

    # ---- evaluation

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.state.fn == TrainerFn.FITTING and self._training and self.ema is not None:
            self.ema.swap_in(self.use)
            self._swapped = True
        else:
            self.on_test_start(trainer, pl_module)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._swapped and self.ema is not None:
            self.ema.swap_out()
            self._swapped = False

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Before ModelCheckpoint saves what there is; where other ranks are needed for that and missing, it will be
        refused.
        """
        if self._swapped and self.ema is not None:
            self._swapped = False
            try:
                self.ema.restore()
            except Error as error:
                warn(f"the module still holds averages: {error}")

    def on_test_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """The averages of a checkpoint in place of its weights, for a run that does not train."""
        if self._found is not None and trainer.state.fn != TrainerFn.FITTING:
            averages = EMA(trainer.strategy.model or pl_module, **self.options)
            self._load(averages, trainer)
            averages.copy_to(trainer.strategy.model or pl_module, self.use)
            self._found = None

    on_predict_start = on_test_start

    # ---- checkpoints

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        if not self._training or self.ema is None:
            return
        state = self.ema.state_dict()  # refused where the module holds the averages: they would be saved as weights
        checkpoint[KEY] = {"step": self.ema.step, "state": state["state"]}
        if not _sharded(trainer.strategy):
            whole = {one: self.ema.full_state_dict(one, complete=False) for one in self.ema.decays}
            checkpoint[KEY]["averages"] = whole if len(whole) > 1 else whole[self.ema.decays[0]]

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        self._found = checkpoint.get(KEY)

    def _beside(self, strategy: Strategy) -> Callable[..., None]:
        """Its save_checkpoint(), which alone is told where; the averages come before the file that makes a directory a
        checkpoint.
        """

        def save_checkpoint(checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
            if KEY in checkpoint and _sharded(strategy) and self.ema is not None:
                self.ema.save(Path(strategy.broadcast(filepath), FILE))
            type(strategy).save_checkpoint(strategy, checkpoint, filepath, storage_options)

        return save_checkpoint

    def _load(self, ema: EMA, trainer: Trainer) -> None:
        where = f"{trainer.ckpt_path}"
        if self._found is None:
            self.begin_anew(f"{where} has no averages")
        elif "averages" in self._found:
            ema.load_state_dict(self._found)
        else:
            ema.load(Path(where, FILE))
            if ema.step != self._found["step"]:
                raise CorruptError(
                    f"{where} is of step {self._found['step']}, averages of {ema.step}: a save was interrupted"
                )


def _sharded(strategy: Strategy) -> bool:
    """Its checkpoints are directories."""
    return bool(
        getattr(strategy, "_save_distributed_checkpoint", False)
        or getattr(strategy, "_state_dict_type", "") == "sharded"
    )
