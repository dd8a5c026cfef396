"""Full tensors from everybody's pieces, in more than one block; and regions of many boxes, out of a tensor and back."""

from __future__ import annotations

from typing import Any

import pytest
import ranks
import torch
import torch.distributed as dist

from shardow import _core
from shardow.distributed import gather, rank_group
from shardow.distributed.gather import Gatherer, LocalShard, extract_region, place, stretch
from shardow.distributed.rank_group import RankGroup
from shardow.distributed.transfers import carrier

SHAPE = (3000, 2000)  # of which rank 1 holds 20 MB: two blocks


def gathered() -> dict[str, bool]:
    whole = _core.Region.whole(SHAPE)
    cut = 1_000_003
    region = whole.window(0, cut) if dist.get_rank() == 0 else whole.window(cut, whole.size)
    values = torch.arange(whole.size, dtype=torch.float32)
    part = LocalShard("t", torch.empty(region.size), region)
    extract_region(values.view(SHAPE), region, part.flat)
    return {
        name: torch.equal(full.view(-1), values)
        for name, full in Gatherer("a test", [part], RankGroup(dist.group.WORLD, 60.0)).whole({}).items()
    }


def test_a_tensor_of_several_blocks_arrives_whole() -> None:
    assert ranks.run(2, gathered) == [{"t": True}, {}]


def carried() -> tuple[list[str], list[int]]:
    """Returns the devices that a group which moves no tensors of the CPU is asked for, and the sizes of what then
    travels. (The group at hand moves none else.)
    """
    alone = dist.new_group(backend="cuda:gloo")
    asked = [str(carrier(alone, torch.device(device))) for device in ("cpu", "cuda:1")]
    with pytest.MonkeyPatch.context() as patch:
        went: list[str] = []
        bytes_moved: list[int] = []
        move = Gatherer._move
        for module in (gather, rank_group):
            patch.setattr(module, "carrier", lambda group, device: (went.append(str(device)), device)[1])
        patch.setattr(
            Gatherer, "_move", lambda *args, **options: (bytes_moved.append(args[2].nbytes), move(*args, **options))[1]
        )
        gathered()
        RankGroup(dist.group.WORLD, 60.0).broadcast(
            torch.ones(2) if dist.get_rank() == 0 else None, [2], torch.float32, torch.device("cpu")
        )
    return [*asked, *went], bytes_moved


def test_what_a_group_cannot_move_goes_through_its_device() -> None:
    """NCCL alone knows no tensors of the CPU; averages on the host are such. A block of at most 16 MiB at a time."""
    devices = ["cuda", "cuda:1", "cpu", "cpu"]
    assert ranks.run(2, carried) == [(devices, [16 << 20, 4 * (6_000_000 - 1_000_003) - (16 << 20)])] * 2


COLUMNS = _core.Region.grid([6, 8], [[(1, 6)], [(0, 2), (5, 8)]])


@pytest.mark.parametrize(
    "region", [COLUMNS, COLUMNS.window(3, 17), COLUMNS.window(4, 4), _core.Region.whole([6, 8])], ids=str
)
@pytest.mark.parametrize("turn", [lambda t: t, lambda t: t.t().contiguous().t()], ids=["rows", "columns"])
def test_what_is_taken_out_of_a_tensor_is_placed_back_where_it_was(region: _core.Region, turn: Any) -> None:
    full = turn(torch.arange(48.0).view(6, 8))
    held = [i for begin, _, length in region.runs() for i in range(begin, begin + length)]
    flat = torch.full((region.size,), -1, dtype=torch.float64)
    extract_region(full, region, flat)
    assert flat.tolist() == held
    expected = [float(i in held) for i in range(48)]
    back = turn(torch.zeros(6, 8))
    place(torch.ones(region.size), region, back)
    assert back.flatten().tolist() == expected


def test_a_stretch_is_a_view_where_the_elements_lie_one_after_another() -> None:
    full = torch.arange(48.0).view(6, 8)
    rows = _core.Region.whole([6, 8]).window(5, 30)
    found = stretch(full, rows)
    assert found is not None
    assert found.tolist() == list(range(5, 30))
    assert found.data_ptr() == full.data_ptr() + 20
    assert stretch(full, COLUMNS) is None
    assert stretch(full.t(), _core.Region.whole([8, 6])) is None
    assert stretch(full, rows.window(2, 2)) is None


def test_regions_that_leave_a_hole_are_refused_by_the_tensors_name() -> None:
    region = _core.Region.whole([4, 3]).window(0, 6)
    with pytest.raises(ValueError, match=r"'t' of shape \(4, 3\): ranks' regions overlap or leave holes \(6 elem"):
        Gatherer("a test", [LocalShard("t", torch.zeros(6), region)], RankGroup(None, None))
