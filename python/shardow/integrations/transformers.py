"""Averages under Hugging Face's Trainer: a callback keeps them, a mixin evaluates, saves and exports them.

    class Averaged(AveragedTrainer, Trainer): ...

    trainer = Averaged(model, arguments, callbacks=[EMACallback(0.999)], ...)
    trainer.train(resume_from_checkpoint=last_checkpoint(arguments.output_dir))
    trainer.save_averages("run/model")  # for from_pretrained()

The mixin exists since the Trainer has no event before an evaluation, nor before it removes old checkpoints. The
callback alone averages, and saves with the checkpoints. Any trainer that is a Trainer will do, TRL's too.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from transformers import Trainer, TrainerCallback, TrainerState

from shardow.base.checks import invalid, unsupported
from shardow.ema import EMA
from shardow.errors import NotFoundError
from shardow.integrations.common import Keeping, Missing, averages_of, newest_first, save_pretrained

__all__ = ["AveragedTrainer", "EMACallback", "last_checkpoint"]

#: In each checkpoint: a file, or with several decays a directory.
FILE = "averages.safetensors"


class EMACallback(Keeping, TrainerCallback):
    """Averages of the Trainer's model, plain, under DDP or FSDP, on every rank; ``callback.ema`` from the beginning of
    training on.

    One update follows each optimizer step; those that a GradScaler skips are not counted. The averages are saved in the
    Trainer's checkpoints, and go on from the one that the Trainer resumes.

    Args:
        decay, options: of shardow.EMA.
        use: which of several decays is evaluated and exported.
        samples: of attach(), for schedules in samples.
        missing: "error": a checkpoint without averages can't be resumed; "from_model": they begin anew there, with a
            warning.
    """

    def __init__(
        self, decay: Any = 0.9999, *, use: Any = None, samples: Any = None, missing: Missing = "error", **options: Any
    ) -> None:
        self.keep(decay, use, missing, options)
        self.samples = samples
        self.resumed: str | None = None  # the checkpoint, where the mixin knows it
        self._saved: str | None = None
        self.files: dict[str, EMA] = {}  # of a checkpoint

    def on_train_begin(
        self, args: Any, state: Any, control: Any, model: Any = None, optimizer: Any = None, **_: Any
    ) -> None:
        if getattr(args, "deepspeed", None):
            raise unsupported("EMACallback: DeepSpeed's optimizer steps masters that the model does not show")
        self.let_go()
        self._saved = None
        self.begin(model)
        if state.global_step:
            self._load(self.resumed or f"{args.output_dir}/checkpoint-{state.global_step}")
        self.follow(optimizer, samples=self.samples)

    def begin(self, model: Any) -> None:
        self.ema = averages_of(model, self.options)
        self.files = {FILE: self.ema}

    def _load(self, folder: str) -> None:
        try:
            for name, ema in self.files.items():
                ema.load(Path(folder, name))
        except NotFoundError:
            others = (
                "Resume one that has it (those that last_checkpoint() finds do), name the right directory through "
                "AveragedTrainer. "
            )
            self.begin_anew(f"{Path(folder, name)} is missing", others)
            for ema in self.files.values():
                ema.reset()

    def save(self, folder: str) -> None:
        """Into a checkpoint's directory. Collective."""
        self._saved = Path(folder).name
        for name, ema in reversed(self.files.items()):  # the first one last: where it is all of them are
            ema.save(Path(folder, name))

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self._saved != f"checkpoint-{state.global_step}":  # not by the mixin
            self.save(f"{args.output_dir}/checkpoint-{state.global_step}")

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if args.load_best_model_at_end and state.best_model_checkpoint:  # the weights have been loaded from there
            self._load(state.best_model_checkpoint)
        self.let_go()


_Base: Any = Trainer if TYPE_CHECKING else object


class AveragedTrainer(_Base):  # type: ignore[misc]
    """Before a Trainer in a class's bases: evaluates and predicts with the averages, saves them first of a checkpoint,
    exports them.
    """

    @property
    def averages(self) -> EMACallback:
        for one in self.callback_handler.callbacks:
            if isinstance(one, EMACallback):
                return one
        raise invalid(f"{type(self).__name__} has no EMACallback: give it one with callbacks=[EMACallback(...)]")

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any) -> Any:
        """As the Trainer's; ``True`` is the last whole checkpoint."""
        if resume_from_checkpoint is True:
            resume_from_checkpoint = last_checkpoint(self.args.output_dir)
            if resume_from_checkpoint is None:
                raise invalid(f"{self.args.output_dir} has no whole checkpoint with averages to resume from")
        self.averages.resumed = resume_from_checkpoint or None
        return super().train(resume_from_checkpoint, *args, **kwargs)

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
        """With the averages in the model, from the beginning of training on."""
        if (ema := self.averages.ema) is None:
            return super().evaluation_loop(*args, **kwargs)
        with ema.swapped(self.averages.use):
            return super().evaluation_loop(*args, **kwargs)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        if _internal_call and output_dir is not None and self.averages.ema is not None:  # the beginning of a checkpoint
            self.averages.save(output_dir)
        super().save_model(output_dir, _internal_call)

    def save_averages(self, output_dir: str, dtype: Any = None, *, max_shard_size: int | str | None = None) -> None:
        """What save_pretrained() leaves, with averaged weights: configuration, tokenizer and all, for
        from_pretrained(). Collective.

        Args: of EMA.export(). An adapter (PEFT) is saved in its own dtype.
        """
        if (ema := self.averages.ema) is None:
            raise invalid("save_averages(): nothing has been averaged before train()")
        model, main = self.accelerator.unwrap_model(self.model, keep_torch_compile=False), self.args.should_save
        save_pretrained(
            ema, model, output_dir, dtype, main=main, max_shard_size=max_shard_size, decay=self.averages.use
        )
        if main and self.processing_class is not None:
            self.processing_class.save_pretrained(output_dir)


def last_checkpoint(output_dir: str | Path) -> str | None:
    """The newest checkpoint in ``output_dir`` that is whole, averages too; None where there is none.

    A killed save leaves a directory that transformers' own get_last_checkpoint() would choose.
    """
    for step, path in newest_first(output_dir, "checkpoint-"):
        try:
            # trainer_state.json is written last.
            whole = TrainerState.load_from_json(str(path / "trainer_state.json")).global_step == step
        except (OSError, ValueError):
            continue
        if whole and (path / FILE).exists():
            return str(path)
    return None
