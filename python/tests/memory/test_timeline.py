"""memory.timeline(): what every rank's memory did during a block, and its picture."""

from __future__ import annotations

import mmap
import time
from pathlib import Path

import numpy as np
import pytest
import ranks
import torch.distributed as dist

import shardow
from shardow.memory import samples

MIB = 2**20


def touch(mib: int) -> mmap.mmap:
    """New pages, which no allocator had."""
    held = mmap.mmap(-1, mib * MIB)
    np.frombuffer(held, dtype=np.uint8)[:: mmap.PAGESIZE] = 1
    return held


def test_a_peak_is_seen_though_it_is_over_at_the_end() -> None:
    with shardow.memory.timeline() as timeline:
        held = touch(100)
        timeline.mark("held")
        del held
        time.sleep(0.1)
    (one,) = timeline.ranks
    assert 100 * MIB <= timeline.peaks()["rank0/above"] == one.peak - one.before < 130 * MIB
    assert one.resident[-1][1] < one.peak - 90 * MIB
    assert [what for _, what in one.marks] == ["held"]
    assert max(amount for _, amount in one.resident) >= one.before + 100 * MIB  # the mark samples
    assert one.proportional
    assert all(0 < amount <= one.peak for _, amount in one.proportional)
    assert not one.device
    assert [at for at, _ in one.resident] == sorted(at for at, _ in one.resident)


def test_what_was_highest_before_the_block_is_not_its_peak() -> None:
    touch(300)
    with shardow.memory.timeline() as timeline:
        pass
    assert timeline.peaks()["rank0/above"] < 20 * MIB


def test_long_blocks_keep_their_highest_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(samples, "_MOST", 16)
    with shardow.memory.timeline(interval=0.002) as timeline:
        time.sleep(0.05)
        held = touch(64)
        time.sleep(0.2)  # for a sampler that has no processor for some time
        del held
        time.sleep(0.3)
    (one,) = timeline.ranks
    assert len(one.resident) <= 17
    assert max(amount for _, amount in one.resident) >= one.before + 64 * MIB
    assert one.resident[-1][0] - one.resident[0][0] > 0.3


def on_ranks(_: object) -> list[float]:
    with shardow.memory.timeline() as timeline:
        held = touch(30 * (dist.get_rank() + 1))
        timeline.mark("held")
        del held
    assert [one.rank for one in timeline.ranks] == [0, 1, 2]
    return [timeline.peaks()[f"rank{rank}/above"] / MIB for rank in range(3)]


def test_every_rank_has_everybodys_samples() -> None:
    first, *others = ranks.run(3, on_ranks, None)
    assert others == [first, first]
    assert all(30 * (rank + 1) <= above < 30 * (rank + 1) + 20 for rank, above in enumerate(first))


def failing(_: object) -> str:
    began = time.monotonic()
    try:
        with shardow.memory.timeline(timeout=2.0) as timeline:
            if dist.get_rank() == 1:
                raise RuntimeError("mine")
    except (RuntimeError, TimeoutError) as error:
        assert time.monotonic() - began < 10
        assert [one.rank for one in timeline.ranks] == [dist.get_rank()]
        assert timeline.ranks[0].resident
        return f"{type(error).__name__}: {error}"
    return "no error"


def test_a_block_that_raises_on_one_rank_makes_nobody_hang() -> None:
    zero, one = ranks.run(2, failing, None, may_die=True)
    assert one == "RuntimeError: mine"
    assert "memory.timeline() is collective" in zero
    assert "[1]" in zero


def test_pictures(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    with shardow.memory.timeline() as large:
        held = touch(50)
        large.mark("held")
        del held
    with shardow.memory.timeline() as small:
        pass
    shardow.memory.draw({"large": large, "small": small}, tmp_path / "a.png")
    shardow.memory.draw({"large": large}, tmp_path / "a.svg")
    assert (tmp_path / "a.png").read_bytes()[:4] == b"\x89PNG"
    assert b"<svg" in (tmp_path / "a.svg").read_bytes()
    left, right = shardow.memory.figure({"large": large, "small": small}).axes
    assert left.get_title("left").startswith("large\nat most 5")
    assert left.get_ylim() == right.get_ylim()
    assert max(left.lines[0].get_ydata()) >= 50
    assert max(right.lines[0].get_ydata()) < 20


def test_every_rank_has_its_line_and_devices_their_row() -> None:
    pytest.importorskip("matplotlib")
    made = [
        samples.Samples(
            rank, [(1.0, 10), (2.0, 10 + 5 * rank)], [], [(1.0, 3 * MIB)], [], before=10, peak=10 + 5 * rank
        )
        for rank in range(3)
    ]
    figure = shardow.memory.figure({"both": shardow.memory.Timeline(made)})
    host, device = figure.axes
    assert [list(line.get_ydata()) for line in host.lines] == [[0, 10], [0, 5], [0, 0]]  # rank 0 last, on top
    assert device.get_ylabel() == "device memory, MiB"
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["rank 0", "other ranks"]


def test_elsewhere_than_on_linux_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.platform", "darwin")
    with pytest.raises(NotImplementedError, match="reads /proc"), shardow.memory.timeline():
        pass
