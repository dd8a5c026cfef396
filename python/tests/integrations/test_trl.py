"""BEMA: the origin's numbers to the last bit, its memory divided by the ranks, resumed where the origin begins anew."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import framework_ranks as ranks
import pytest
from launched import equal, killed_after, launched, of_accelerators
from safetensors.torch import load_file
from small_trainer import FSDP, loss_of, tiny, trainer_of
from stubs import Stub

pytest.importorskip("transformers")
from transformers import LlamaForCausalLM, Trainer, TrainerCallback

from shardow.integrations.transformers import EMACallback, last_checkpoint
from shardow.integrations.trl import BEMACallback

RULES: list[dict[str, Any]] = [
    {"update_freq": 1},
    {"update_freq": 2, "update_after": 3, "lag": 2, "multiplier": 0.5},
    {"update_freq": 3, "ema_power": 0.9, "bias_power": 0.0, "min_ema_multiplier": 0.4},
    {"update_freq": 100},
]


@pytest.fixture(scope="module")
def origin() -> Iterator[Any]:
    before = dict(sys.modules)
    sys.modules.update(
        {name: Stub(name) for name in ("pandas", "datasets", "pyarrow", "pyarrow.compute", "pyarrow.types")}
    )
    try:
        yield pytest.importorskip("trl.trainer.callbacks").BEMACallback
    finally:
        for name in {*sys.modules} - {*before}:
            if name.partition(".")[0] in ("trl", "pandas", "datasets", "pyarrow"):
                del sys.modules[name]


@pytest.fixture(autouse=True)
def forgotten() -> Iterator[None]:
    import accelerate

    yield
    accelerate.state.AcceleratorState._reset_state(True)
    accelerate.state.GradientState._reset_state()


@pytest.mark.parametrize("rule", RULES, ids=str)
def test_it_is_the_origin_s_to_the_last_bit(rule: dict[str, Any], origin: Any, tmp_path: Path) -> None:
    theirs = origin(**rule)
    ours = BEMACallback(**rule)
    trainer_of(tmp_path, callbacks=[theirs, ours], made=Trainer, max_steps=7).train()
    assert ours.ema is not None
    assert equal(ours.ema.full_state_dict(), theirs.running_model.state_dict())
    opened = LlamaForCausalLM.from_pretrained(tmp_path / "bema", local_files_only=True)  # where both wrote theirs
    assert equal(opened.state_dict(), theirs.running_model.state_dict())


def bema() -> BEMACallback:
    return BEMACallback(2, update_after=1, lag=2)


class Watching(TrainerCallback):
    def __init__(self, averages: BEMACallback) -> None:
        self.averages = averages

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.found = [one.full_state_dict() for one in self.averages.files.values()]
        self.elements = sum(one.stats()["elements"] for one in self.averages.files.values())


def trained(kind: str, out: Path, steps: int = 6, dies_after: int | None = None) -> tuple[Any, ...]:
    """BEMA in the end, what there was at the beginning, the elements that this rank keeps, and the loss of an
    evaluation.
    """
    with launched(), killed_after(dies_after):
        of_accelerators(kind == "fsdp2")
        averages = bema()
        watching = Watching(averages)
        trainer = trainer_of(out, callbacks=[averages, watching], max_steps=steps, **(FSDP if kind == "fsdp2" else {}))
        trainer.train(last_checkpoint(out))
        assert averages.ema is not None
        return averages.ema.full_state_dict(), watching.found, watching.elements, trainer.evaluate()["eval_loss"]


@pytest.mark.parametrize("kind", ["fsdp2", *(["ddp"] if os.environ.get("SHARDOW_ALL") else [])])
def test_killed_and_resumed_it_is_that_of_a_run_that_nothing_stopped(kind: str, tmp_path: Path) -> None:
    straight, *_ = ranks.run(2, trained, kind, tmp_path / "straight")
    ranks.run(2, trained, kind, tmp_path / "killed", 6, 5, may_die=True)
    assert last_checkpoint(tmp_path / "killed") == str(tmp_path / "killed" / "checkpoint-4")
    parts = ranks.run(2, trained, kind, tmp_path / "killed")
    assert equal(parts[0][0], straight[0])
    opened = LlamaForCausalLM.from_pretrained(tmp_path / "killed" / "bema", local_files_only=True)
    assert equal(opened.state_dict(), straight[0])
    assert [one[3] for one in parts] == [straight[3]] * 2 == pytest.approx([loss_of(opened)] * 2, abs=1e-6)
    elements = sum(one.numel() for one in tiny().parameters())
    assert sum(one[2] for one in parts) == 3 * elements  # the origin: on every rank
    assert max(one[2] for one in parts) < 0.6 * 3 * elements


def test_at_another_world_size_average_first_weights_and_bema_are_those_that_were_saved(tmp_path: Path) -> None:
    ranks.run(2, trained, "ddp", tmp_path, 5)
    here = ranks.run(3, trained, "ddp", tmp_path)[0][1]
    names = ["averages.safetensors", "bema-average.safetensors", "bema-first.safetensors"]
    saved = [load_file(tmp_path / "checkpoint-5" / name) for name in names]
    assert [equal({name: one[name] for name in other}, other) for one, other in zip(here, saved, strict=True)] == [
        True
    ] * 3
    assert not equal(saved[0], saved[1])
    assert not equal(saved[1], saved[2])


def test_it_is_evaluated_and_what_has_no_bema_is_not_resumed(tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path, callbacks=[bema()])
    trainer.train()
    averaged = tiny()
    trainer.averages.ema.copy_to(averaged)
    assert trainer.evaluate()["eval_loss"] == pytest.approx(loss_of(averaged), abs=1e-6)
    trainer_of(tmp_path / "other", callbacks=[EMACallback(0.9)]).train()
    with pytest.raises(
        FileNotFoundError, match=r"bema-average.safetensors is missing.*BEMACallback\(missing='from_model'\)"
    ):
        trainer_of(tmp_path / "other", callbacks=[bema()], max_steps=5).train(True)
    anew = BEMACallback(10, missing="from_model")
    with pytest.warns(UserWarning, match="begin anew"):
        trainer_of(tmp_path / "other", callbacks=[anew], max_steps=5).train(True)
    weights = load_file(tmp_path / "other" / "checkpoint-4" / "model.safetensors")
    assert anew.ema is not None
    assert equal(anew.ema.full_state_dict(), weights)


def test_a_rule_of_ema_s_own_is_refused() -> None:
    with pytest.raises(ValueError, match="rules of its own in place of decay"):
        BEMACallback(decay=0.9)
