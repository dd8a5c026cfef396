"""Long work shows a bar on a terminal, and what it is asked to call elsewhere."""

from __future__ import annotations

import io
import sys
from pathlib import Path

import models
import pytest
import ranks
import torch
import torch.distributed as dist

import shardow
from shardow.base.progress import shown


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_bar_of_bytes_is_drawn_on_rank_0s_terminal_after_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    now = [0.0]
    monkeypatch.setattr("tqdm.std.time", lambda: now[0])
    monkeypatch.setattr("tqdm.tqdm._time", lambda self: now[0], raising=False)
    update = shown(None, "save a.safetensors", rank=0)
    assert update is not None
    update(10, 4000)
    assert terminal.getvalue() == ""
    update(2000, 4000)
    now[0] = 5.0
    update(3000, 4000)
    assert "save a.safetensors" in terminal.getvalue()
    assert "3.00k/4.00k" in terminal.getvalue()
    update(4000, 4000)
    assert shown(None, "save", rank=1) is None


def test_nothing_is_shown_where_there_is_no_terminal(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    shardow.save({"a": torch.ones(3)}, tmp_path / "a.safetensors")
    assert capsys.readouterr().err == ""


def test_progress_is_called_with_bytes_done_and_in_all(tmp_path: Path) -> None:
    calls: list[tuple[int, int]] = []
    state = {"a": torch.ones(1000), "b": torch.ones(3).bool()}
    shardow.save(state, tmp_path / "a.safetensors", progress=lambda done, total: calls.append((done, total)))
    assert calls[-1] == (4003, 4003)
    calls.clear()
    shardow.load(
        {"a": torch.zeros(1000)},
        tmp_path / "a.safetensors",
        strict=False,
        progress=lambda done, total: calls.append((done, total)),
    )
    assert calls[-1] == (4000, 4000)  # what is read, not what is there


def told_no_more(path: str) -> list[tuple[str, str]]:
    """Rank 0's callback raises: at once, then at the end; in a save, a load and a save in the background."""
    model, outcomes = models.build("fsdp2", dist.get_world_size()), []
    shardow.save(model, path)
    for at_the_end in (False, True):

        def progress(done: int, total: int, at_the_end: bool = at_the_end) -> None:
            if done >= total or not at_the_end:
                raise LookupError("stop it")

        for call in (shardow.save, shardow.load, lambda *a, **k: shardow.async_save(*a, **k).wait()):
            try:
                call(model, path, progress=progress, timeout=100)
            except LookupError as error:
                outcomes.append(("its own", str(error)))
            except shardow.Error as error:
                outcomes.append((type(error).__name__, str(error)))
    return outcomes


def test_a_callback_that_raises_stops_its_own_call_on_all_ranks_at_once(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    zero, *others = ranks.run(3, told_no_more, str(path), timeout=60)
    assert [how for how, _ in zero] == ["its own"] * 6
    for one in others:
        assert [how for how, _ in one] == ["PeerFailedError"] * 6
        assert all(message.endswith("rank 0 of 3 failed: progress= raised LookupError: stop it") for _, message in one)
    assert [file.name for file in tmp_path.iterdir()] == [path.name]


def test_what_lies_between_the_wanted_bytes_is_not_progress(tmp_path: Path) -> None:
    state = {f"{i}": torch.ones(100) for i in range(20)}
    shardow.save(state, tmp_path / "a.safetensors")
    calls: list[tuple[int, int]] = []
    wanted = {name: torch.zeros(100) for name in list(state)[::2]}  # read at once, with what lies between them
    shardow.load(
        wanted, tmp_path / "a.safetensors", strict=False, progress=lambda done, total: calls.append((done, total))
    )
    assert calls[-1] == (4000, 4000)
