"""A published step is one state of training, whatever training does while it is written.

Torn: the memory that is being written is filled anew meanwhile (NVIDIA/nvidia-resiliency-ext #376). Stale: a later save
publishes an earlier state (NVIDIA-NeMo/RL #3312). Both mistakes are made on purpose, too, to see that they are found.
"""

from __future__ import annotations

import functools
import itertools
import os
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import ranks
import torch
import torch.distributed as dist
from runs import Run, equal, tensors_of

import shardow
from shardow.checkpoints import face
from shardow.files import background, engine

ALL = bool(os.environ.get("SHARDOW_ALL"))
_start, _settle, _write = background.start, background.settle, background.SaveHandle._write


def overwrite(run: Run) -> None:
    with torch.no_grad():
        for parameter in run.model.parameters():
            parameter.mul_(-1)


def swap(run: Run) -> None:
    with run.ema.swapped(decay=0.9):
        pass


ACTIONS: dict[str, Callable[[Run], Any]] = {
    "update": lambda run: run.train(1),
    "swap": swap,
    "overwrite": overwrite,
    "reset": lambda run: run.ema.reset(),
}
SAVES = ("save", "asynchronous save")
PROGRAMS = [
    (*before, save, *after)
    for before in (("update",), ("overwrite",))
    for save in SAVES
    for after in (("update",), ("swap", "reset"))
]
PROGRAMS += list(itertools.permutations(ACTIONS, 2))


class Writers:
    """Stop at ``point`` of their way, until somebody waits for them, or lets them go."""

    def __init__(self, point: str) -> None:
        self.point = point
        self._open = threading.Event()

    def options(self) -> dict[str, Any]:
        opened = self.hold()
        return {"progress": lambda done, total: _stop(opened)} if self.point == "midway" else {}

    def hold(self) -> threading.Event:
        self._open = threading.Event()
        return self._open

    def write(self, handle: background.SaveHandle, *save: Any) -> None:
        if self.point == "first":
            _stop(self._open)
        _write(handle, *save)

    def let_go(self) -> None:
        self._open.set()

    def settle(self, process_group: Any) -> None:
        self.let_go()
        _settle(process_group)


def _stop(opened: threading.Event) -> None:
    assert opened.wait(60), "nobody waits for the writer, and nobody lets it go"


@contextmanager
def patched(writers: Writers, mistake: str) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(background.SaveHandle, "_write", lambda handle, *save: writers.write(handle, *save))
        settle = (lambda _: None) if mistake == "torn" else writers.settle
        for module in (face, engine):
            patch.setattr(module, "settle", settle)
        if mistake == "stale":
            patch.setattr(engine, "start", lambda *save: stale(writers, *save))
        yield


def stale(writers: Writers, process_group: Any, *save: Any) -> Any:
    """Publishes what was staged before, where something was."""
    staging = background._slot(process_group).staging
    before = staging.clone() if staging is not None else None
    writers.hold()
    handle = _start(process_group, *save)
    if before is not None:
        background._slot(process_group).staging[: before.numel()].copy_(before)
        writers.let_go()
    return handle


def play(
    kind: str, folder: Path, program: Sequence[str], save: Callable[[Run, shardow.Checkpoints, bool], None]
) -> None:
    """The same values each time."""
    run, checkpoints = Run(kind, seed=3), shardow.Checkpoints(folder, keep=None)
    run.train(1)
    save(run, checkpoints, True)
    for name in program:
        if name in SAVES:
            save(run, checkpoints, name != "save")
        else:
            ACTIONS[name](run)


def torn_or_stale(kind: str, folder: str, point: str, program: Sequence[str], mistake: str = "") -> list[str]:
    """Steps that are not what they were when they were saved."""
    writers, handles = Writers(point), []

    def later(run: Run, checkpoints: shardow.Checkpoints, asynchronous: bool) -> None:
        if not asynchronous:
            run.save(checkpoints)
            return
        options = {} if mistake else writers.options()
        handles.append(run.save(checkpoints, asynchronous=True, **options))

    play(kind, Path(folder) / "wanted", program, lambda run, checkpoints, _: run.save(checkpoints))
    background._slot(dist.group.WORLD if dist.is_initialized() else None).staging = None
    with patched(writers, mistake):
        play(kind, Path(folder) / "found", program, later)
        writers.let_go()
        for handle in handles:
            handle.wait()
    wanted = sorted(one.name for one in (Path(folder) / "wanted").iterdir())
    assert wanted == sorted(one.name for one in (Path(folder) / "found").iterdir())
    return [
        name
        for name in wanted
        if not equal(*(tensors_of(Path(folder) / which / name) for which in ("wanted", "found")))
    ]


def all_programs(kind: str, folder: str, programs: Sequence[Sequence[str]]) -> list[str]:
    wrong = []
    for number, (point, program) in enumerate(itertools.product(("first", "midway"), programs)):
        wrong += [f"{point}, {program}: {step}" for step in torn_or_stale(kind, f"{folder}/{number}", point, program)]
    return wrong


@pytest.mark.parametrize(
    ("kind", "world"), [("plain", 1), ("fsdp2", 2), ("ddp", 2)] if ALL else [("plain", 1), ("fsdp2", 2)]
)
def test_a_step_is_what_it_was_when_it_was_saved_whatever_comes_while_it_is_written(
    kind: str, world: int, tmp_path: Path
) -> None:
    programs = PROGRAMS if ALL else PROGRAMS[:: 2 * world + 3]
    if world == 1:
        found = [all_programs(kind, str(tmp_path), programs)]
    else:
        found = ranks.run(world, all_programs, kind, str(tmp_path), programs)
    assert found == [[]] * world


TWICE = ("update", "asynchronous save", "update")


def test_memory_that_is_filled_anew_while_it_is_written_is_found(tmp_path: Path) -> None:
    assert torn_or_stale("plain", str(tmp_path / "a"), "first", TWICE) == []
    assert torn_or_stale("plain", str(tmp_path / "b"), "first", TWICE, "torn") == ["step-000000001"]


def test_a_later_save_of_an_earlier_state_is_found(tmp_path: Path) -> None:
    assert torn_or_stale("plain", str(tmp_path), "first", TWICE, "stale") == ["step-000000002"]


def held() -> dict[str, int]:
    """By this process: bytes of memory, and how many of everything else."""
    memory = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    shared = sum("shardow" in name for name in os.listdir("/dev/shm"))
    return {
        "memory": memory,
        "descriptors": len(os.listdir("/proc/self/fd")),
        "threads": len(os.listdir("/proc/self/task")),
        "shared": shared,
    }


def save_often(folder: str, saves: int) -> list[dict[str, int]]:
    """What is held after a tenth of them, and after all."""
    state = {"a": torch.zeros(40, 3), "b": torch.zeros(7)}
    group = dist.group.WORLD if dist.is_initialized() else None
    found = []
    for number in range(1, saves + 1):
        state["a"].fill_(number)
        shardow.async_save(state, f"{folder}/{number % 3}", group=group).wait()
        if number in (saves // 10, saves):
            found.append(held())
    assert shardow.open(f"{folder}/{saves % 3}")["a"].eq(saves).all()
    return found


@pytest.mark.parametrize("world", [1, 2] if ALL else [1])
def test_many_asynchronous_saves_hold_no_more_than_a_tenth_of_them(world: int, memory_folder: Path) -> None:
    saves = functools.partial(save_often, str(memory_folder), 1000 if ALL else 300)
    for first, last in [saves()] if world == 1 else ranks.run(world, saves, timeout=600.0):
        assert last["memory"] - first["memory"] < 8 << 20, (first, last)
        for what in ("descriptors", "threads", "shared"):  # other tests have some too; 270 saves would have hundreds
            assert last[what] < first[what] + 20, (first, last)


@pytest.fixture
def memory_folder(tmp_path: Path) -> Iterator[Path]:
    """In memory: a thousand flushes of a busy disk take minutes."""
    if not os.access("/dev/shm", os.W_OK):
        yield tmp_path
        return
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="one_step_") as folder:
        yield Path(folder)
