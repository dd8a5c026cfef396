"""A teacher's tensors are the averages: bit for bit those of an ordinary EMA, in no memory beside its own."""

from __future__ import annotations

import contextlib
import copy
import gc
import os
import weakref
from pathlib import Path
from typing import Any

import models
import pytest
import ranks
import torch
from outcomes import outcome
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import shardow

ALL = bool(os.environ.get("SHARDOW_ALL"))
CASES = [("plain", 1), ("ddp", 2), ("fsdp1", 2), ("fsdp1-flat", 2), ("fsdp2", 3), ("hsdp", 4), ("tp+fsdp2", 4)]
if ALL:
    CASES += [("fsdp1-grad-op", 2), ("fsdp1-no-shard", 2), ("fsdp1-hybrid", 4), ("fsdp2", 1), ("wrapped", 2)]
#: EMAs with a teacher each, beside an ordinary one of the same options.
WAYS: dict[str, dict[str, Any]] = {
    "lerp": {"decay": 0.9},
    "averaged buffers": {"decay": 0.9, "buffers": "average"},
    "every second step": {"decay": 0.8, "rule": "mul_add", "update_every": 2, "start_step": 2},
    "stochastic": {"decay": 0.99999, "stochastic": True},
}
STEPS = 6


def teacher_of(kind: str, dtype: torch.dtype = torch.float32) -> nn.Module:
    """Returns one of other values than the student; DistributedDataParallel takes no module that is not trained."""
    plain = models.plain_twin(kind, dtype).requires_grad_(False)
    for parameter in plain.parameters():
        parameter.add_(1)
    return plain if kind == "ddp" else models.PARALLEL[kind](plain, torch.distributed.get_world_size())


def distill(kind: str, dtype: torch.dtype, folder: str) -> dict[str, bool]:
    """Trains a student against its teacher. Returns what holds, by what it is, on this rank."""
    student = models.build(kind, torch.distributed.get_world_size(), dtype)
    teachers = {way: teacher_of(kind, dtype) for way in WAYS}
    emas = {
        way: shardow.EMA(student, averages=teachers[way], replicas="copy", **options) for way, options in WAYS.items()
    }
    options = {"replicas": "copy", "dtype": dtype}
    ordinary = {way: shardow.EMA(student, **{**options, **asked}) for way, asked in WAYS.items()}
    optimizer = torch.optim.SGD(student.parameters(), lr=0.02)
    generator = torch.Generator().manual_seed(torch.distributed.get_rank() if kind != "tp+fsdp2" else 0)
    for _ in range(STEPS):
        inputs = models.batch(generator, dtype)
        with torch.no_grad():
            wanted = teachers["lerp"](inputs)
        optimizer.zero_grad()
        (student(inputs) - wanted).float().square().mean().backward()
        optimizer.step()
        for ema in [*emas.values(), *ordinary.values()]:
            ema.update()
    held = {}
    for way, ema in emas.items():
        ours, others = ema.full_state_dict(), ordinary[way].full_state_dict()
        held[f"{way}: averages"] = ours.keys() == others.keys() and all(torch.equal(ours[n], others[n]) for n in ours)
        held[f"{way}: the teacher's answers"] = same_answers(student, teachers[way], ordinary[way], generator, dtype)
        held[f"{way}: bytes moved"] = ema.stats()["bytes_moved"] == ordinary[way].stats()["bytes_moved"]
    saved = models.whole_weights(teachers["lerp"])
    emas["lerp"].save(f"{folder}/averages.safetensors")
    emas["lerp"].reset()
    held["reset"] = all(
        torch.equal(a, b)
        for a, b in zip(
            models.whole_weights(teachers["lerp"]).values(), models.whole_weights(student).values(), strict=True
        )
    )
    emas["lerp"].load(f"{folder}/averages.safetensors")
    loaded = models.whole_weights(teachers["lerp"])
    held["load"] = emas["lerp"].step == STEPS and all(torch.equal(loaded[name], saved[name]) for name in saved)
    return held


def same_answers(
    student: nn.Module, teacher: nn.Module, ema: shardow.EMA, generator: torch.Generator, dtype: torch.dtype
) -> bool:
    inputs = models.batch(generator, dtype)
    if isinstance(student, DistributedDataParallel):  # its forward would give all ranks rank 0's buffers
        student = student.module
    student.eval(), teacher.eval()
    with torch.no_grad():
        others = teacher(inputs)
        with ema.swapped():
            ours = student(inputs)
    student.train(), teacher.train()
    return torch.equal(ours, others)


@pytest.mark.parametrize(("kind", "world"), CASES)
def test_a_teacher_has_the_averages_of_an_ordinary_ema_and_answers_as_the_model_in_swapped(
    kind: str, world: int, tmp_path: Path
) -> None:
    for held in ranks.run(world, distill, kind, torch.float32, str(tmp_path)):
        assert {what for what, holds in held.items() if not holds} == set()


def pair(dtype: torch.dtype = torch.float32) -> tuple[nn.Module, nn.Module]:
    """A student, and a teacher of other values."""
    student = models.make(dtype)
    teacher = models.make(dtype, seed=1).requires_grad_(False)
    return student, teacher


def weights_of(module: nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in module.state_dict().items()}


@pytest.mark.filterwarnings("ignore:averages in torch.bfloat16")
def test_averages_have_the_teachers_dtype() -> None:
    student, _ = pair()
    teacher = models.make(torch.bfloat16).requires_grad_(False)
    ema, ordinary = shardow.EMA(student, 0.9, averages=teacher), shardow.EMA(student, 0.9, dtype=torch.bfloat16)
    for _ in range(3):
        with torch.no_grad():
            for parameter in student.parameters():
                parameter.add_(0.1)
        ema.update()
        ordinary.update()
    assert all(
        torch.equal(average, teacher.state_dict()[name])
        for name, average in ordinary.full_state_dict(complete=False).items()
    )
    assert ema.stats()["bytes"] == ordinary.stats()["bytes"]


def test_a_teacher_begins_as_the_student_with_what_is_frozen_or_keeps_its_values() -> None:
    student, teacher = pair()
    student[0].requires_grad_(False)
    before = weights_of(teacher)
    ema = shardow.EMA(student, 0.9, averages=teacher, begin="teacher")
    assert all(torch.equal(before[name], value) for name, value in teacher.state_dict().items())
    del ema
    shardow.EMA(student, 0.9, averages=teacher)
    assert all(torch.equal(student.state_dict()[name], value) for name, value in teacher.state_dict().items())


def test_buffers_follow_as_asked() -> None:
    followed = {}
    for buffers in ("copy", "average", "ignore"):
        student, teacher = pair()
        ema = shardow.EMA(student, 0.5, averages=teacher, buffers=buffers)
        student(torch.randn(16, models.INPUTS))
        ema.update()
        ours, others = student[-1], teacher[-1]
        followed[buffers] = (
            torch.equal(others.running_mean, ours.running_mean),
            torch.equal(others.running_mean, ours.running_mean / 2),
            int(others.num_batches_tracked),
        )
    assert followed == {"copy": (True, False, 1), "average": (False, True, 1), "ignore": (False, False, 0)}


def test_buffers_that_the_student_replaces_or_gets_later_are_copied_and_the_teachers_may_not_move() -> None:
    student, teacher = pair()
    for module in (student, teacher):
        module.register_buffer("mask", torch.zeros(3), persistent=False)
    ema = shardow.EMA(student, 0.5, averages=teacher)
    for value in (3.0, 4.0):
        ema.update()
        student[-1].running_mean = torch.full_like(student[-1].running_mean, value)
        teacher.mask = torch.ones(3)  # is in no state
        ema.update()
        assert teacher[-1].running_mean.tolist() == student[-1].running_mean.tolist()
    student[-1].late = nn.BatchNorm1d(2, affine=False)
    student[-1].running_mean.fill_(5)
    ema.update()
    ema.update()
    assert teacher[-1].running_mean.tolist() == student[-1].running_mean.tolist()
    assert "7.late.running_mean" in ema.full_state_dict()
    teacher[-1].running_mean = teacher[-1].running_mean.clone()
    with pytest.raises(shardow.Error, match="moved or replaced since this EMA was made"):
        ema.update()


def test_a_backward_through_what_an_update_has_written_over_raises() -> None:
    student, teacher = pair()
    ema = shardow.EMA(student, 0.5, averages=teacher)
    answers = [teacher.eval()(torch.randn(16, models.INPUTS, requires_grad=True)).sum() for _ in range(2)]
    answers[0].backward()
    ema.update()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        answers[1].backward()


def test_names_map_and_tensors_by_name_are_a_teacher() -> None:
    student, _ = pair()
    tensors = {f"ema.{name}": torch.zeros_like(value) for name, value in student.named_parameters()}
    ema = shardow.EMA(student, 0.9, averages=tensors, names=lambda name: f"ema.{name}")
    assert all(torch.equal(tensors[f"ema.{name}"], value) for name, value in student.named_parameters())
    by_mapping = {
        "0.weight": torch.zeros(7, models.INPUTS),
        **{n: torch.zeros_like(p) for n, p in student.named_parameters() if n != "0.bias"},
        "bias": torch.zeros(7),
    }
    shardow.EMA(student, 0.9, averages=by_mapping, names={"0.bias": "bias"})
    assert torch.equal(by_mapping["bias"], student[0].bias)
    assert ema.names == tuple(name for name, _ in student.named_parameters())


class Adapted(nn.Module):
    """Two adapters over one frozen base, as PEFT keeps them: the second one is the teacher's."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(4, 4).requires_grad_(False)
        self.adapters = nn.ModuleDict({"default": nn.Linear(4, 4), "ema": nn.Linear(4, 4).requires_grad_(False)})


def test_a_second_adapter_over_the_same_base_is_a_teacher() -> None:
    model = Adapted()
    ema = shardow.EMA(model, 0.5, averages=model, names=lambda name: name.replace(".default.", ".ema."))
    default, second = model.adapters["default"], model.adapters["ema"]
    assert torch.equal(default.weight, second.weight)
    before = weights_of(default)
    with torch.no_grad():
        default.weight.add_(1)
    ema.update()
    assert torch.equal(second.weight, torch.lerp(before["weight"], default.weight, 0.5))


def refused(student: nn.Module, teacher: Any, message: str, **options: Any) -> None:
    before = weights_of(teacher) if isinstance(teacher, nn.Module) else {}
    with pytest.raises(shardow.Error, match=message):
        shardow.EMA(student, **{"decay": 0.9, "averages": teacher, **options})
    if before:
        assert all(torch.equal(before[name], value) for name, value in teacher.state_dict().items())


def test_what_is_no_teacher_is_refused_before_anything_is_written() -> None:
    student, teacher = pair()
    refused(student, teacher[:3], r"missing in the teacher: 3\.weight.*Make the teacher as the student is made")
    refused(
        student, nn.Sequential(nn.Linear(6, 9), *teacher[1:]).requires_grad_(False), r"'0\.weight' has shape \[9, 6\]"
    )
    refused(student, student, "of the teacher would be trained")
    refused(student.requires_grad_(False), student, "is the student's own", params="all")
    student.requires_grad_(True)
    refused(student, teacher, "one average", decay=[0.9, 0.99])
    refused(student, teacher, "one average", device="cpu")
    refused(student, teacher, "begin='first'", begin="first")
    refused(student, 3, "int is neither a module nor a mapping")
    mixed = copy.deepcopy(teacher)
    mixed[3].double()
    refused(student, mixed, r"'3\.weight' is torch\.float64 on cpu in the teacher")
    strided = copy.deepcopy(teacher)
    strided[0].weight.data = torch.zeros(models.INPUTS, 7).t()
    refused(student, strided, "not contiguous")
    kept = shardow.EMA(student, 0.9, averages=teacher)
    refused(student, teacher, "is another EMA's average")
    assert kept.step == 0


class Tied(nn.Module):
    def __init__(self, tied: bool) -> None:
        super().__init__()
        self.embedding, self.head = nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False)
        if tied:
            self.head.weight = self.embedding.weight


@pytest.mark.parametrize("tied", [False, True])
def test_a_teacher_whose_tensors_are_tied_otherwise_is_refused(tied: bool) -> None:
    refused(Tied(tied), Tied(not tied).requires_grad_(False), "other tensors are tied in the teacher")
    shardow.EMA(Tied(tied), 0.9, averages=Tied(tied).requires_grad_(False)).update()


def stale(folder: str) -> list[bool]:
    """Whether a sharded teacher's answer is that of its averages after it was asked before they were written."""
    student, teacher = models.build("fsdp2", 2), teacher_of("fsdp2")
    ema = shardow.EMA(student, 0.5, averages=teacher, nonfinite="raise")
    inputs = models.batch(torch.Generator())
    fresh = []

    def check() -> None:
        teacher.eval()
        with torch.no_grad():
            answer = teacher(inputs)
            for module in teacher.modules():
                if hasattr(module, "reshard"):
                    module.reshard()
            fresh.append(torch.equal(answer, teacher(inputs)))

    check()
    for parameter in student.parameters():
        parameter.data.mul_(2)
    shardow.Checkpoints(folder).save(1, student)
    shardow.Checkpoints(folder).restore(student, ema, absent={"averages": "from_model"})
    check()
    list(student.parameters())[-1].data.fill_(float("nan"))
    student.get_submodule("0").weight.data.mul_(2)
    with contextlib.suppress(ValueError):
        ema.update()
    check()
    return fresh


def test_a_teacher_answers_by_its_averages_however_they_were_written(tmp_path: Path) -> None:
    assert ranks.run(2, stale, str(tmp_path)) == [[True, True, True]] * 2


def test_what_a_teacher_does_not_do_says_so() -> None:
    student, teacher = pair()
    ema = shardow.EMA(student, 0.9, averages=teacher)
    for enter in (lambda: ema.swapped().__enter__(), ema.swap_in):
        with pytest.raises(shardow.Error, match="the averages are the teacher's weights; call the teacher"):
            enter()
    with pytest.raises(shardow.Error, match="SGD holds parameters of the teacher"):
        ema.attach(torch.optim.SGD([*student.parameters(), *teacher.parameters()], lr=0.1))
    with pytest.raises(shardow.Error, match="can't be copied whose averages are a teacher's"):
        copy.deepcopy(ema)
    teacher.double()
    with pytest.raises(shardow.Error, match="moved or replaced since this EMA was made"):
        ema.update()
    assert ema.step == 0


def test_a_dropped_ema_leaves_its_teacher_to_the_next_one() -> None:
    student, teacher = pair()
    ema = shardow.EMA(student, 0.9, averages=teacher, overlap=True)
    kept = weakref.ref(ema._averages)
    del ema
    gc.collect()
    assert kept() is None
    shardow.EMA(student, 0.9, averages=teacher, begin="teacher").update()


def test_a_teacher_that_waits_for_its_updates_is_copied_and_saved_as_any_module(tmp_path: Path) -> None:
    student, teacher = pair()
    optimizer = torch.optim.SGD(student.parameters(), lr=0.1)
    ema = shardow.EMA(student, 0.9, averages=teacher, overlap=True, optimizer=optimizer)
    optimizer.step()  # updates the averages
    ema.state_dict()  # waits for them
    torch.save(teacher, tmp_path / "teacher.pt")
    wanted = weights_of(teacher)
    for again in (torch.load(tmp_path / "teacher.pt", weights_only=False), copy.deepcopy(teacher)):
        inputs = models.batch(torch.Generator())
        assert torch.equal(again.eval()(inputs), teacher.eval()(inputs))
        assert all(torch.equal(value, wanted[name]) for name, value in again.state_dict().items())


def test_checkpoints_resume_a_student_and_its_teacher(tmp_path: Path) -> None:
    student, teacher = pair()
    ema = shardow.EMA(student, 0.9, averages=teacher)
    with torch.no_grad():
        student[0].weight.add_(1)
    student(models.batch(torch.Generator()))
    ema.update()
    shardow.Checkpoints(tmp_path).save(1, student, ema)
    wanted = weights_of(teacher)
    again, its_teacher = pair()
    other = shardow.EMA(again, 0.9, averages=its_teacher)
    shardow.Checkpoints(tmp_path).restore(again, other)
    assert other.step == 1
    assert all(torch.equal(value, wanted[name]) for name, value in its_teacher.state_dict().items())
    stored = [name for file in tmp_path.rglob("*.safetensors") for name in shardow.open(file) if name != "random"]
    assert sorted(stored) == sorted([*student.state_dict(), *ema.names])  # the averages once


def shrink(kind: str, folder: Path, steps: int) -> dict[str, torch.Tensor]:
    """Goes on from the checkpoint in ``folder``, with weights that shrink, and leaves one. The whole teacher."""
    student, teacher = models.build(kind, torch.distributed.get_world_size()), teacher_of(kind)
    ema, checkpoints = shardow.EMA(student, 0.9, averages=teacher, replicas="copy"), shardow.Checkpoints(folder)
    if checkpoints.latest() is not None:
        checkpoints.restore(student, ema)
    while ema.step < steps:
        for parameter in student.parameters():
            parameter.data.mul_(0.9)
        ema.update()
    checkpoints.save(steps, student, ema)
    return models.whole_weights(teacher)


RESUMES = [("fsdp2", 3, 2), *([("hsdp", 4, 2), ("fsdp1", 2, 3), ("tp+fsdp2", 4, 2), ("ddp", 2, 1)] if ALL else [])]


@pytest.mark.parametrize(("kind", "before", "after"), RESUMES)
def test_a_teacher_resumes_on_another_number_of_ranks(kind: str, before: int, after: int, tmp_path: Path) -> None:
    ranks.run(before, shrink, kind, tmp_path / "killed", 2)
    resumed = ranks.run(after, shrink, kind, tmp_path / "killed", 4)
    (whole, *_) = ranks.run(before, shrink, kind, tmp_path / "whole", 4)
    for teacher in resumed:
        assert teacher.keys() == whole.keys()
        assert all(torch.equal(teacher[name], whole[name]) for name in whole)


def made(kind: str) -> list[bool]:
    """Whether what module() makes has the averages themselves, answers as the model in swapped(), and is one."""
    student = models.build(kind, torch.distributed.get_world_size())
    ema, ordinary = shardow.EMA(student, 0.9, replicas="copy"), shardow.EMA(student, 0.9, replicas="copy")
    teacher, generator = ema.module(), torch.Generator().manual_seed(0)
    for _ in range(3):
        student(models.batch(generator))  # moves batch statistics
        for parameter in student.parameters():
            parameter.data.mul_(0.9)
        ema.update()
        ordinary.update()
    memory = {average.data_ptr() for average in ema.state_dict()["averages"].values()}
    return [
        teacher is ema.module(),
        memory == {parameter.data_ptr() for parameter in teacher.parameters()},
        same_answers(student, teacher, ordinary, generator, torch.float32),
    ]


@pytest.mark.parametrize(("kind", "world"), [("plain", 1), ("ddp", 2)])
def test_module_makes_a_teacher_of_the_averages_themselves(kind: str, world: int) -> None:
    assert ranks.run(world, made, kind) == [[True] * 3] * world


def unmade(kind: str) -> Any:
    return outcome(shardow.EMA(models.build(kind, 2), 0.9).module)[:2]


@pytest.mark.parametrize(
    ("kind", "error", "message"),
    [
        ("fsdp2", "UnsupportedError", "module(): the model is sharded; make the teacher like it"),
        ("ddp", "InvalidArgumentError", "a teacher has one average"),
    ],
)
def test_module_of_what_a_rank_has_a_part_of_is_refused(kind: str, error: str, message: str) -> None:
    for raised, text in ranks.run(2, unmade, kind):
        assert raised == error
        assert message in text or "is divided among replicas" in text


def test_module_keeps_ties_frozen_weights_and_its_own_dtype_and_says_what_it_is_not_made_of() -> None:
    student = Tied(True).bfloat16()
    student.scale = nn.Parameter(torch.ones(2), requires_grad=False)
    ema = shardow.EMA(student, 0.9)
    teacher = ema.module()
    assert teacher.head.weight is teacher.embedding.weight
    assert (teacher.head.weight.dtype, teacher.scale.tolist()) == (torch.float32, [1, 1])
    assert not any(parameter.requires_grad for parameter in teacher.parameters())
    with pytest.raises(shardow.Error, match="the averages are the teacher's weights; call the teacher"):
        ema.swap_in()
    with pytest.raises(shardow.Error, match="averages= of this EMA are tensors"):
        shardow.EMA(nn.Linear(1, 1), 0.9, averages={"weight": torch.zeros(1, 1), "bias": torch.zeros(1)}).module()
    with pytest.raises(shardow.Error, match="a teacher has one average"):
        shardow.EMA(student, [0.9, 0.99]).module()


class Rebuilt(nn.Linear):
    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Module:
        made = Rebuilt(self.in_features, self.out_features)
        made.load_state_dict(self.state_dict())
        return made


class Shared(nn.Linear):
    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Module:
        return self


@pytest.mark.parametrize("kind", [Rebuilt, Shared, nn.Linear])
def test_module_of_what_copies_otherwise_is_refused_and_leaves_the_ema_and_the_student_as_they_were(
    kind: type[nn.Linear],
) -> None:
    student = nn.Sequential(nn.Linear(2, 2), kind(2, 2))
    if kind is nn.Linear:
        forward = student[1].forward
        student[1].forward = lambda *inputs: forward(*inputs)
    ema = shardow.EMA(student, 0.5)
    with pytest.raises(
        shardow.Error, match=r"a module (with a __deepcopy__|whose forward is replaced).*averages=the_co"
    ):
        ema.module()
    assert all(parameter.requires_grad for parameter in student.parameters())
    for parameter in student.parameters():
        parameter.data.mul_(3)
    ema.update()
    torch.testing.assert_close(ema.state_dict()["averages"]["1.weight"], student[1].weight.detach() * 2 / 3)
    with ema.swapped():
        pass


def test_module_is_called_in_the_averages_dtype_whatever_is_frozen_strided_or_made_in_inference_mode() -> None:
    frozen = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last).requires_grad_(False)
    student = nn.Sequential(frozen, nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(4, 2)).bfloat16()
    ema = shardow.EMA(student, 0.5)
    with torch.inference_mode():
        teacher = ema.module()
    assert teacher(torch.randn(2, 3, 3, 3)).dtype == torch.float32
    student[1].running_mean.fill_(3)
    ema.update()
    assert teacher[1].running_mean.tolist() == [3] * 4
