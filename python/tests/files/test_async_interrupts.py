"""Signals in asynchronous saves and in waits for them: each file has one state, and each report of a save is true."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ranks
import torch
import torch.distributed as dist
from stopped_swaps import Stop, by_a_signal

import shardow

EVERY = bool(os.environ.get("SHARDOW_ALL"))
STRIDE = 1 if EVERY else 47
NUMBERS = 200_000


@pytest.fixture(autouse=True)
def _ctrl_c() -> Iterator[None]:
    """A job in the background of a shell begins with SIGINT ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def state(value: float) -> dict[str, torch.Tensor]:
    return {f"t{i}": torch.full((NUMBERS,), float(value)) for i in range(4)}


def values(path: Path) -> set[float]:
    """All values that a file has, read with its checksums."""
    into = state(-1.0)
    shardow.load(into, path, verify=True)
    return {float(value) for tensor in into.values() for value in tensor.unique()}


class HeldSave:
    """Holds a save where it first tells its progress, until go_on()."""

    def __init__(self) -> None:
        self._reached, self._go_on = threading.Event(), threading.Event()

    def __call__(self, done: int, total: int) -> None:
        self._reached.set()
        assert self._go_on.wait(60)

    def go_on(self) -> None:
        self._go_on.set()

    def interrupt(self) -> threading.Timer:
        """Sends SIGINT to this process when the save is held."""

        def send() -> None:
            assert self._reached.wait(60)
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

        timer = threading.Timer(0.3, send)
        timer.start()
        return timer


def test_a_save_that_goes_on_behind_an_interrupted_one_keeps_its_values(tmp_path: Path) -> None:
    held = HeldSave()
    first = shardow.async_save(state(1), tmp_path / "first.safetensors", progress=held)
    timer = held.interrupt()
    with pytest.raises(KeyboardInterrupt):
        shardow.async_save(state(2), tmp_path / "second.safetensors")
    timer.join()
    assert not first.done()
    letting_go = threading.Timer(0.3, held.go_on)
    letting_go.start()
    shardow.async_save(state(3), tmp_path / "third.safetensors").wait()
    assert first.done()
    first.wait()
    assert values(tmp_path / "first.safetensors") == {1.0}
    assert values(tmp_path / "third.safetensors") == {3.0}
    assert not (tmp_path / "second.safetensors").exists()


@pytest.mark.parametrize("well", [True, False])
def test_a_wait_that_was_interrupted_says_nothing_of_the_save(well: bool, tmp_path: Path) -> None:
    held, path = HeldSave(), tmp_path / "a.safetensors"
    handle = shardow.async_save(state(1), path, progress=held)
    timer = held.interrupt()
    with pytest.raises(KeyboardInterrupt):
        handle.wait()
    timer.join()
    assert not handle.done()
    with pytest.raises(TimeoutError, match="it goes on"):
        handle.wait(timeout=0.05)
    if not well:
        path.mkdir()
    held.go_on()
    if well:
        assert handle.wait()["files"] == [str(path)]
        assert values(path) == {1.0}
    else:
        with pytest.raises(shardow.Error, match="a directory"):
            handle.wait()
    assert handle.done()


PROGRAM = """
import os, signal, sys, threading, time
import torch, shardow
signal.signal(signal.SIGINT, signal.default_int_handler)
state = {str(i): torch.full((1 << 20,), float(i)) for i in range(4)}
reached = threading.Event()
handle = shardow.async_save(state, sys.argv[1], progress=lambda done, total: (reached.set(), time.sleep(0.4)))
threading.Thread(target=lambda: (reached.wait(), os.kill(os.getpid(), signal.SIGINT)), daemon=True).start()
try:
    handle.wait()
except KeyboardInterrupt:
    print("interrupted")
"""


def test_the_interpreter_waits_for_a_save_whose_wait_was_interrupted(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    done = subprocess.run([sys.executable, "-c", PROGRAM, path], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "interrupted\n", "")
    written = shardow.open(path)
    assert all((written[name] == float(name)).all() for name in written)


def test_a_relative_path_is_that_of_the_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home, elsewhere = tmp_path / "home", tmp_path / "elsewhere"
    home.mkdir()
    elsewhere.mkdir()
    monkeypatch.chdir(home)
    model = torch.nn.Linear(2, 2)
    ema, checkpoints = shardow.EMA(model, 0.5), shardow.Checkpoints("run", keep=1)
    saves: list[Any] = [
        lambda: shardow.async_save(state(1), "a.safetensors"),
        lambda: ema.async_save("ema.safetensors"),
        lambda: checkpoints.save(1, model, asynchronous=True),
        lambda: checkpoints.save(2, model, asynchronous=True),
    ]
    for save in saves:
        monkeypatch.chdir(home)
        held = HeldSave()
        handle = save()
        monkeypatch.chdir(elsewhere)
        held.go_on()
        handle.wait()
    assert list(elsewhere.iterdir()) == []
    assert sorted(path.name for path in home.iterdir()) == ["a.safetensors", "ema.safetensors", "run"]
    assert os.listdir(home / "run") == ["step-000000002"]
    assert checkpoints.latest() == 2


class Walk:
    """Interrupts one rank before one line after the other of two saves and a wait, and looks at what is there then."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._step = folder, 0.0
        self._sharing = dist.is_initialized()
        self.points = 0

    def _save(self, name: str) -> shardow.SaveHandle:
        self._step += 1
        group = dist.group.WORLD if self._sharing else None
        self._saved[name] = self._step
        return shardow.async_save(state(self._step), self._folder / f"{name}.safetensors", group=group, timeout=2)

    def stop_at(self, where: int, victim: bool) -> bool:
        """Returns whether there was such a line."""
        self._saved: dict[str, float] = {}
        handles: dict[str, shardow.SaveHandle] = {}
        reports: dict[str, bool] = {}
        stop = Stop(where)
        try:
            with by_a_signal(stop if victim else Stop(10**9)):
                for name in ("a", "b"):
                    handles[name] = self._save(name)
                handles["b"].wait()
        except (KeyboardInterrupt, shardow.Error):
            self.points += 1
        for name, handle in handles.items():
            try:
                handle.wait()
                reports[name] = True
            except shardow.Error:
                reports[name] = False
        if self._sharing:
            dist.barrier()
        for name, written in reports.items():
            content = values(self._folder / f"{name}.safetensors") if written else set()
            assert not written or content == {self._saved[name]}, (stop, name, content)
        for path in self._folder.glob("*.safetensors"):
            assert len(values(path)) == 1, (stop, path)
        if self._sharing:
            dist.barrier()
        return bool(stop.where)

    def go(self) -> int:
        for where in range(0, 100_000, STRIDE):
            victim = not self._sharing or (where // STRIDE) % 2 == dist.get_rank()
            came = [self.stop_at(where, victim)]
            if self._sharing:
                of_all: list[Any] = [None] * dist.get_world_size()
                dist.all_gather_object(of_all, came[0])
                came = of_all
            if not any(came):
                return self.points
        raise AssertionError("no end")


def walked(folder: str) -> int:
    signal.signal(signal.SIGINT, signal.default_int_handler)
    return Walk(Path(folder)).go()


@pytest.mark.timeout(3000 if EVERY else 300)
@pytest.mark.parametrize("world", [1, 2])
def test_interrupted_before_any_line_files_have_one_state_and_reports_are_true(world: int, tmp_path: Path) -> None:
    if world == 1:
        assert walked(str(tmp_path)) > (200 if EVERY else 5)
    else:
        assert min(ranks.run(world, walked, str(tmp_path), timeout=2900 if EVERY else 280)) > (200 if EVERY else 3)
