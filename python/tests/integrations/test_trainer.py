"""The Trainer with averages: killed and resumed, evaluated, exported, on one rank and several."""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import framework_ranks as ranks
import pytest
import torch
from launched import equal, killed_after, launched, of_accelerators
from safetensors.torch import load_file
from small_trainer import FSDP, Averaged, loss_of, sequences, tiny, trainer_of
from torch import nn
from torch.distributed.tensor import DTensor

import shardow

transformers = pytest.importorskip("transformers")
from transformers import LlamaForCausalLM, Trainer, TrainerCallback, TrainerState  # noqa: E402

from shardow.integrations.transformers import EMACallback, last_checkpoint  # noqa: E402


class Begun(TrainerCallback):
    """What the averages were when training began."""

    def __init__(self, averages: EMACallback) -> None:
        self.averages = averages

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        ema = self.averages.ema
        assert ema is not None
        self.step, self.found = ema.step, ema.full_state_dict(self.averages.use)
        self.sharded = any(isinstance(weight, DTensor) for weight in model.parameters())


@pytest.fixture
def alone() -> Iterator[None]:
    """In this process, with what accelerate remembers forgotten at the end."""
    import accelerate

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
    accelerate.state.AcceleratorState._reset_state(True)
    accelerate.state.GradientState._reset_state()


def weights_of(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: weight.detach().clone() for name, weight in model.named_parameters()}


def several(kind: str, out: Path, steps: int, **more: Any) -> tuple[Any, Begun]:
    of_accelerators(kind == "fsdp2")
    averages = EMACallback([0.5, 0.9], use=0.9)
    begun = Begun(averages)
    return trainer_of(
        out, callbacks=[averages, begun], max_steps=steps, **(FSDP if kind == "fsdp2" else {}), **more
    ), begun


def trained(kind: str, out: Path, dies_after: int | None = None) -> tuple[dict[str, torch.Tensor], float]:
    """The averages in the end, and the loss of an evaluation."""
    with launched(), killed_after(dies_after):
        trainer, _ = several(kind, out, 4)
        trainer.train(last_checkpoint(out))
        trainer.save_averages(out / "model")
        return trainer.averages.ema.full_state_dict(0.9), trainer.evaluate()["eval_loss"]


@pytest.mark.parametrize("kind", ["fsdp2", *(["ddp"] if os.environ.get("SHARDOW_ALL") else [])])
def test_killed_and_resumed_the_averages_are_those_of_a_run_that_nothing_stopped(kind: str, tmp_path: Path) -> None:
    (straight, loss), (_, other) = ranks.run(2, trained, kind, tmp_path / "straight")
    ranks.run(2, trained, kind, tmp_path / "killed", 3, may_die=True)
    assert last_checkpoint(tmp_path / "killed") == str(tmp_path / "killed" / "checkpoint-2")
    assert not (tmp_path / "killed" / "model").exists()
    assert equal(ranks.run(2, trained, kind, tmp_path / "killed")[0][0], straight)
    opened = LlamaForCausalLM.from_pretrained(tmp_path / "killed" / "model", local_files_only=True)
    assert equal(opened.state_dict(), straight)
    assert loss == other == pytest.approx(loss_of(opened), abs=1e-6)


def resumed(kind: str, out: Path) -> tuple[int, dict[str, torch.Tensor], bool]:
    """Step and averages at the moment of resume, and whether the model is sharded."""
    with launched():
        trainer, begun = several(kind, out, 5)
        trainer.train(resume_from_checkpoint=True)
        return begun.step, begun.found, begun.sharded


@pytest.mark.parametrize(("kind", "world"), [("ddp", 3), ("fsdp2", 1), ("fsdp2", 3)])
def test_at_another_world_size_the_averages_resumed_are_those_that_were_saved(
    kind: str, world: int, tmp_path: Path
) -> None:
    there, _ = ranks.run(2, trained, kind, tmp_path)[0]
    (step, here, sharded), *_ = ranks.run(world, resumed, kind, tmp_path)
    assert (step, sharded) == (4, kind == "fsdp2")
    assert equal(here, there)


# ---- on one rank


@pytest.mark.usefixtures("alone")
def test_it_evaluates_and_predicts_with_the_averages_and_hands_the_weights_back(tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path, eval_dataset={"one": sequences(4), "two": sequences(8)})
    before = trainer.evaluate()  # of the weights: there are no averages yet
    trainer.train()
    ema = trainer.averages.ema
    weights = weights_of(trainer.model)
    found = trainer.evaluate()
    averaged = tiny()
    ema.copy_to(averaged)
    losses = [loss_of(model) for model in (averaged, trainer.model, tiny())]
    assert found["eval_one_loss"] == pytest.approx(losses[0], abs=1e-6) != pytest.approx(losses[1], abs=1e-3)
    assert trainer.predict(sequences(4)).metrics["test_loss"] == found["eval_one_loss"] != found["eval_two_loss"]
    assert before["eval_one_loss"] == pytest.approx(losses[2], abs=1e-6)
    assert equal(weights_of(trainer.model), weights)


class Failing(Averaged):
    def prediction_step(self, *args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("in the middle of an evaluation")


@pytest.mark.usefixtures("alone")
def test_an_evaluation_that_fails_leaves_the_weights(tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path, made=Failing)
    trainer.train()
    weights = weights_of(trainer.model)
    with pytest.raises(RuntimeError, match="in the middle"):
        trainer.evaluate()
    assert equal(weights_of(trainer.model), weights)


class Scaled(Averaged):
    """With a GradScaler whose first scales overflow, as on a device in float16."""

    def create_accelerator_and_postprocess(self) -> None:
        super().create_accelerator_and_postprocess()
        self.accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127, backoff_factor=2.0**-70)


@pytest.mark.usefixtures("alone")
def test_steps_that_a_scaler_skips_are_not_counted(tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path, made=Scaled)
    trainer.train()
    assert trainer.state.global_step == 4
    assert trainer.averages.ema.step == 3


@pytest.mark.usefixtures("alone")
def test_each_step_counts_once_however_often_one_trains(tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path, gradient_accumulation_steps=2)
    trainer.train()
    first = trainer.averages.ema
    trainer.train()
    assert (first.step, trainer.averages.ema.step) == (4, 4)
    trainer.optimizer.step()  # after training, nobody's
    assert trainer.averages.ema.step == 4


@pytest.mark.usefixtures("alone")
def test_the_callback_saves_a_second_training_under_the_same_numbers(tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path, made=Trainer, callbacks=[EMACallback(0.9)], save_steps=4)
    for _ in range(2):
        trainer.train()
        (tmp_path / "checkpoint-4" / "averages.safetensors").unlink()


def test_the_last_checkpoint_has_the_number_that_it_was_saved_under(tmp_path: Path) -> None:
    for number in (4, 9):
        folder = tmp_path / f"checkpoint-{number}"
        folder.mkdir()
        TrainerState(global_step=4).save_to_json(str(folder / "trainer_state.json"))
        (folder / "averages.safetensors").touch()
    assert last_checkpoint(tmp_path) == str(tmp_path / "checkpoint-4")


class Fails(TrainerCallback):
    """Raises once, after two steps."""

    def __init__(self) -> None:
        self.failed = False

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == 2 and not self.failed:
            self.failed = True
            raise RuntimeError("after two steps")


@pytest.mark.usefixtures("alone")
def test_after_a_training_that_failed_the_next_one_has_averages_to_itself(tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path, callbacks=[EMACallback(0.9), Fails()], max_steps=4)
    with pytest.raises(RuntimeError, match="after two steps"):
        trainer.train()
    first = trainer.averages.ema
    trainer.train()
    assert (first.step, trainer.averages.ema.step) == (2, 4)


@pytest.mark.usefixtures("alone")
def test_a_checkpoint_without_averages_is_not_resumed_in_silence(tmp_path: Path) -> None:
    trainer_of(tmp_path / "there").train()
    (tmp_path / "there" / "checkpoint-4" / "averages.safetensors").unlink()
    where = str(tmp_path / "there" / "checkpoint-4")
    with pytest.raises(
        shardow.errors.NotFoundError, match=r"checkpoint-4/averages.safetensors is missing.*missing='from_model'"
    ):
        trainer_of(tmp_path / "here").train(resume_from_checkpoint=where)
    trainer = trainer_of(tmp_path / "here", callbacks=[EMACallback(0.9, missing="from_model")], max_steps=5)
    with pytest.warns(UserWarning, match="begin anew from the checkpoint's weights"):
        trainer.train(resume_from_checkpoint=where)
    assert (trainer.state.global_step, trainer.averages.ema.step) == (5, 1)
    assert last_checkpoint(tmp_path / "there") == str(tmp_path / "there" / "checkpoint-2")
    (tmp_path / "there" / "checkpoint-2" / "trainer_state.json").write_text('{"global_')  # where a save was killed
    assert last_checkpoint(tmp_path / "there") is None
    with pytest.raises(ValueError, match="no whole checkpoint with averages"):
        trainer_of(tmp_path / "there").train(resume_from_checkpoint=True)


@pytest.mark.usefixtures("alone")
def test_it_goes_on_from_another_directory_than_its_own(tmp_path: Path) -> None:
    straight = trainer_of(tmp_path / "straight", save_only_model=False)
    straight.train()
    other = trainer_of(tmp_path / "here")
    other.train(resume_from_checkpoint=str(tmp_path / "straight" / "checkpoint-2"))
    assert equal(other.averages.ema.full_state_dict(), straight.averages.ema.full_state_dict())


@pytest.mark.usefixtures("alone")
def test_the_callback_alone_averages_and_saves_under_any_trainer(tmp_path: Path) -> None:
    trainer_of(tmp_path, made=Trainer).train()
    with_mixin = trainer_of(tmp_path / "mixin")
    with_mixin.train()
    assert equal(
        load_file(tmp_path / "checkpoint-4" / "averages.safetensors"),
        with_mixin.averages.ema.full_state_dict(complete=False),
    )
    averages = EMACallback(0.9)
    trainer_of(tmp_path, made=Trainer, callbacks=[averages], max_steps=5).train(resume_from_checkpoint=True)
    assert averages.ema is not None
    assert averages.ema.step == 5


@pytest.mark.usefixtures("alone")
def test_the_best_model_comes_back_with_its_averages(tmp_path: Path) -> None:
    best = {
        "eval_strategy": "steps",
        "eval_steps": 2,
        "load_best_model_at_end": True,
        "metric_for_best_model": "step",
        "greater_is_better": False,
    }
    count = iter(range(10))
    trainer = trainer_of(tmp_path, compute_metrics=lambda _: {"step": next(count)}, **best)
    trainer.train()
    assert trainer.state.best_model_checkpoint == str(tmp_path / "checkpoint-2")
    assert equal(
        trainer.averages.ema.full_state_dict(complete=False),
        load_file(tmp_path / "checkpoint-2" / "averages.safetensors"),
    )
    assert trainer.averages.ema.step == 2


# ---- what the ecosystem opens


def tokenizer() -> Any:
    from tokenizers import Tokenizer, models

    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel({"a": 0, "b": 1}, unk_token="a")), pad_token="a"
    )


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize(("dtype", "tied"), [(None, False), ("bfloat16", True)])
def test_an_export_has_all_that_from_pretrained_takes(dtype: str | None, tied: bool, tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path, tiny(tie_word_embeddings=tied), processing_class=tokenizer())
    trainer.train()
    trainer.save_averages(tmp_path / "model", dtype, max_shard_size=4000)
    assert len(list((tmp_path / "model").glob("*.safetensors"))) > 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        opened = LlamaForCausalLM.from_pretrained(tmp_path / "model", local_files_only=True)
    assert opened.dtype == getattr(torch, dtype or "float32")
    averages = trainer.averages.ema.full_state_dict()
    assert equal(opened.state_dict(), {name: tensor.to(opened.dtype) for name, tensor in averages.items()})
    assert transformers.AutoTokenizer.from_pretrained(tmp_path / "model", local_files_only=True)("b")["input_ids"] == [
        1
    ]
    assert json.loads((tmp_path / "model" / "config.json").read_text())["architectures"] == ["LlamaForCausalLM"]


@pytest.mark.usefixtures("alone")
def test_of_an_adapter_the_averaged_adapter_is_exported(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    trainer = trainer_of(
        tmp_path, peft.get_peft_model(tiny(), peft.LoraConfig(task_type="CAUSAL_LM", r=2, target_modules=["q_proj"]))
    )
    trainer.train()
    trainer.save_averages(tmp_path / "adapter")
    opened = peft.PeftModel.from_pretrained(tiny(), tmp_path / "adapter")
    averages = trainer.averages.ema.full_state_dict(complete=False)
    assert averages
    assert not equal(averages, {name: trainer.model.state_dict()[name] for name in averages})
    assert equal(averages, {name: opened.state_dict()[name] for name in averages})


@pytest.mark.usefixtures("alone")
def test_a_module_that_is_none_of_transformers_is_exported_too(tmp_path: Path) -> None:
    class Plain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = tiny()

        def forward(self, input_ids: Any, labels: Any) -> Any:
            return self.inner(input_ids=input_ids, labels=labels)

    trainer = trainer_of(tmp_path, Plain())
    trainer.train()
    trainer.save_averages(tmp_path / "model", max_shard_size=4000)
    found = shardow.open(tmp_path / "model", "torch")
    assert equal(dict(found), trainer.averages.ema.full_state_dict())
    assert not (tmp_path / "model" / "model.safetensors").exists()


@pytest.mark.usefixtures("alone")
def test_what_cannot_be_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="has no EMACallback"):
        trainer_of(tmp_path, callbacks=[TrainerCallback()]).train()
    with pytest.raises(ValueError, match="nothing has been averaged before train"):
        trainer_of(tmp_path).save_averages(tmp_path / "model")
    with pytest.raises(ValueError, match="missing='never'; it must be one of"):
        EMACallback(missing="never")  # type: ignore[arg-type]
    with pytest.raises(shardow.errors.UnsupportedError, match="DeepSpeed's optimizer steps masters"):
        EMACallback().on_train_begin(SimpleNamespace(deepspeed="ds.json"), None, None)
