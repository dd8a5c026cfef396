"""materialize() where something fails: one typed error on every rank, within the deadline, model and optimizer as they were.

Then a good call works.
"""

from __future__ import annotations

import functools
import os
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import ranks
import test_meta
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import shardow
from shardow.ranks import stream

TIMEOUT = 2.0
SLACK = 3.0  # of a busy machine
ALL = bool(os.environ.get("SHARDOW_ALL"))

Told = tuple[str, str, float]  # (exception's type, message, seconds)


def good_state() -> dict[str, torch.Tensor]:
    torch.manual_seed(7)
    return test_meta.Model().state_dict()


def on_meta() -> tuple[nn.Module, torch.optim.Optimizer]:
    """Sharded without memory, with tied weights, a table, a counter, and an optimizer that knew the parameters before."""
    with shardow.meta_init():
        model = test_meta.Model()
    optimizer = torch.optim.AdamW([{"params": list(model.layers.parameters())}, {"params": [model.embed.weight], "lr": 0.5}])
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for unit in [*model.layers, model]:
        fully_shard(unit, mesh=mesh)
    return model, optimizer


def told_by(call: Callable[[], object], unchanged: Callable[[], object]) -> Told:
    """What the call raised; ``unchanged`` is asked before and after it."""
    before, began = unchanged(), time.monotonic()
    try:
        call()
    except Exception as error:
        told = type(error).__name__, str(error), time.monotonic() - began
    else:
        told = "none", "", time.monotonic() - began
    assert unchanged() == before, told
    return told


def standing(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[object]:
    """Which tensors are on meta, which are one, whose values there are, and the optimizer's objects."""
    everything = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    values = {name: getattr(tensor, "_local_tensor", tensor).tolist() for name, tensor in everything if not tensor.is_meta}
    bound = [[id(param) for param in group["params"]] for group in optimizer.param_groups]
    return [{name for name, tensor in everything if tensor.is_meta}, model.head.weight is model.embed.weight, values, bound]


def is_good(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    state = {name: getattr(tensor, "full_tensor", lambda tensor=tensor: tensor)() for name, tensor in model.state_dict().items()}
    assert all(torch.equal(state[name], tensor) for name, tensor in good_state().items())
    assert model.head.weight is model.embed.weight
    assert [id(p) for g in optimizer.param_groups for p in g["params"]] == [id(p) for p in [*model.layers.parameters(), model.embed.weight]]


def materialize(source: Any, again: bool = True, foreign: torch.optim.Optimizer | None = None, **options: Any) -> Told:
    """A call that fails, and then, ``again``, a good one."""
    model, optimizer = on_meta()
    call = functools.partial(shardow.materialize, model, source, foreign or optimizer, timeout=TIMEOUT, **options)
    told = told_by(call, functools.partial(standing, model, optimizer))
    if again:
        shardow.materialize(model, on_rank(0, good_state()), optimizer, timeout=60)
        is_good(model, optimizer)
    return told


def check(told: list[Told], kinds: list[str], says: str, most: float = TIMEOUT) -> None:
    """``most``: seconds; less than the timeout means that nobody waited for it."""
    assert [kind for kind, _, _ in told] == kinds, told
    for kind, message, seconds in told:
        assert says in message, (kind, message)
        assert "Traceback" not in message
        assert seconds < most, (kind, message)


def on_rank(rank: int, there: Any, elsewhere: Any = None) -> Any:
    return there if dist.get_rank() == rank else elsewhere


# Files


def written(how: str, folder: Path) -> Path:
    path = folder / "a.safetensors"
    shardow.save(good_state(), path)
    data = bytearray(path.read_bytes())
    if how == "flipped bit":
        data[-5] ^= 1
    wrong = {
        "truncated": data[:-5],
        "header alone": data[:100],
        "empty": b"",
        "foreign": b"PK\3\4" * 99,
        "missing": None,
        "flipped bit": data,
    }[how]
    path.unlink()
    if wrong is not None:
        path.write_bytes(wrong)
    return path


@pytest.mark.parametrize(
    ("how", "kind", "says"),
    [
        ("truncated", "CorruptError", "cut off"),
        ("header alone", "CorruptError", "the file has 100"),
        ("empty", "CorruptError", "no safetensors file"),
        ("foreign", "CorruptError", "a zip file"),
        ("missing", "NotFoundError", "No such file"),
        ("flipped bit", "CorruptError", "checksum"),
    ],
)
def test_a_bad_file_is_one_error_on_every_rank(how: str, kind: str, says: str, tmp_path: Path) -> None:
    path = written(how, tmp_path)
    told = ranks.run(3, materialize, str(path))
    assert str(path) in told[0][1]
    check(told, [kind] * 3, says)


def where_rank_1_has_no_file(folder: str) -> Told:
    here = os.getcwd()
    os.chdir(on_rank(1, "/", folder))
    try:
        return materialize("a.safetensors")
    finally:
        os.chdir(here)


def test_a_file_that_one_rank_does_not_see(tmp_path: Path) -> None:
    shardow.save(good_state(), tmp_path / "a.safetensors")
    check(ranks.run(3, where_rank_1_has_no_file, str(tmp_path)), ["NotFoundError"] * 3, "a.safetensors: cannot open: No such file")


# Contents

WRONG = {
    "a missing name": "missing in the {where}: rotary.calls",
    "an unexpected name": "unexpected in the {where}: other",
    "a shape": "'layers.0.bias' has shape [5] in the {where} and [4] here",
    "ints for floats": "'layers.1.bias' is",
}


def wrong_state(how: str) -> dict[str, torch.Tensor]:
    state = good_state()
    if how == "a missing name":
        del state["rotary.calls"]
    elif how == "an unexpected name":
        state["other"] = torch.zeros(1)
    elif how == "a shape":
        state["layers.0.bias"] = torch.zeros(5)
    else:
        state["layers.1.bias"] = torch.zeros(4, dtype=torch.int32)
    return state


def with_wrong_contents(how: str, path: str) -> list[Told]:
    """From a file, from mappings of which one is wrong, and from rank 0's."""
    own = on_rank(1, wrong_state(how), good_state())
    return [materialize(path), materialize(own), materialize(on_rank(0, wrong_state(how)))]


@pytest.mark.parametrize("how", WRONG)
def test_contents_that_do_not_fit(how: str, tmp_path: Path) -> None:
    state = {
        name: tensor for name, tensor in wrong_state(how).items() if name != "head.weight"
    }  # in a file that does not fit, a second name is listed
    shardow.save(state, tmp_path / "a.safetensors")
    by_rank = ranks.run(3, with_wrong_contents, how, str(tmp_path / "a.safetensors"))
    from_file, own, rank_0 = ([told[i] for told in by_rank] for i in range(3))
    check(from_file, ["InvalidArgumentError"] * 3, WRONG[how].format(where="file"))
    check(own, ["PeerFailedError", "InvalidArgumentError", "PeerFailedError"], WRONG[how].format(where="source"))
    check(rank_0, ["InvalidArgumentError"] * 3, WRONG[how].format(where="source"))


def from_rank_0_with(elsewhere: object) -> None:
    model, optimizer = on_meta()
    shardow.materialize(model, on_rank(0, good_state(), elsewhere), optimizer, timeout=60)
    is_good(model, optimizer)


def nothing_elsewhere() -> Told:
    """Torch's full state dicts are {} on all ranks but the first."""
    from_rank_0_with({})
    from_rank_0_with(on_rank(1, None, {}))
    return materialize(on_rank(1, good_state(), {}))


def test_an_empty_mapping_on_the_other_ranks_is_none() -> None:
    told = ranks.run(3, nothing_elsewhere)
    check(told, ["InvalidArgumentError"] * 3, "ranks have different sources: an empty mapping, a mapping, an empty mapping")


# Initialisation, optimizers


def fill(module: nn.Module) -> None:
    for key, tensor in [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]:
        if key not in module._non_persistent_buffers_set:
            tensor.fill_(1)


def fails_on_rank_1(how: str) -> Told:
    def init(module: nn.Module) -> None:
        fill(module)
        if dist.get_rank() == 1 and isinstance(module, nn.Linear):
            if how == "raises":
                raise ZeroDivisionError("no fan")
            module.bias = nn.Parameter(torch.zeros(3))

    return materialize(init)


def test_an_initialisation_that_fails_on_one_rank() -> None:
    check(ranks.run(3, fails_on_rank_1, "raises"), ["PeerFailedError", "ZeroDivisionError", "PeerFailedError"], "no fan")
    told = ranks.run(3, fails_on_rank_1, "leaves another shape")
    check(told, ["PeerFailedError", "InvalidArgumentError", "PeerFailedError"], "'layers.0.bias' left it with shape [3], not [4]")


def with_a_foreign_optimizer() -> Told:
    return materialize(good_state(), foreign=on_rank(1, torch.optim.SGD(nn.Linear(2, 2).parameters())))


def test_an_optimizer_that_is_foreign_on_one_rank() -> None:
    check(ranks.run(3, with_a_foreign_optimizer), ["PeerFailedError", "InvalidArgumentError", "PeerFailedError"], "optimizer group 0")


# Sources


class Failing(Mapping[str, torch.Tensor]):
    """A mapping that can't be read any more after its first bytes were on the way."""

    def __init__(self) -> None:
        self._state = good_state()
        self.then: Callable[[], object] | None = None

    def __getitem__(self, key: str) -> torch.Tensor:
        if self.then is not None:
            self.then()
        return self._state[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._state)

    def __len__(self) -> int:
        return len(self._state)


def cannot_read() -> None:
    raise OSError("the disk is gone")


_slept: list[bool] = []


def sleep() -> None:
    """Once."""
    if not _slept:
        _slept.append(True)
        time.sleep(TIMEOUT + 1)


def in_the_middle(rank: int, then: Callable[[], object], again: bool) -> Told:
    """``then`` happens on one rank, after rank 0 has sent the first of many messages."""
    _slept.clear()
    source = Failing() if dist.get_rank() == 0 else None
    with mock.patch.object(stream, "_MESSAGE", 32):
        if rank == 0:
            return materialize(source, again, progress=lambda done, total: source is not None and setattr(source, "then", then))
        receive = stream.Client.receive
        later = iter([False, False, False])

        def received(side: stream.Client, data: torch.Tensor, sender: int) -> Any:
            if dist.get_rank() == rank and next(later, True):
                then()
            return receive(side, data, sender)

        with mock.patch.object(stream.Client, "receive", received):
            return materialize(source, again)


def test_a_source_that_fails_in_the_middle() -> None:
    told = ranks.run(3, in_the_middle, 0, cannot_read, True)
    check(told, ["OSError", "PeerFailedError", "PeerFailedError"], "the disk is gone")
    assert all("rank 0 of 3 failed" in message for _, message, _ in told[1:])


# A late rank


def before_the_call(then: Callable[[], object], again: bool) -> Told:
    _slept.clear()
    if dist.get_rank() == 1:
        then()
    return materialize(good_state(), again)


def test_a_rank_that_is_late_gets_the_same_error_and_all_go_on() -> None:
    told = ranks.run(3, before_the_call, sleep, True)
    check(told, ["DeadlineError"] * 3, f"rank(s) [1] did not take part within {TIMEOUT:g} s. Call it on all", TIMEOUT + SLACK)


# Ranks that die or sleep. Last, since each case makes processes anew


def die() -> None:
    os._exit(1)


@pytest.mark.parametrize("rank", [0, 1] if ALL else [1])
def test_a_rank_that_dies_in_the_middle(rank: int) -> None:
    told = ranks.run(3, in_the_middle, rank, die, False, may_die=True)
    assert told.pop(rank) is None
    check(told, ["PeerFailedError", "PeerFailedError" if rank == 0 else "DeadlineError"], "", TIMEOUT + SLACK)
    for _, message, _ in told:
        assert f"and rank {rank} did not arrive" in message or f"rank(s) [{rank}] did not take part" in message


@pytest.mark.parametrize("rank", [0, 1] if ALL else [0])
def test_a_rank_that_sleeps_in_the_middle(rank: int) -> None:
    told = ranks.run(2, in_the_middle, rank, sleep, False, may_die=True)
    check(told, ["PeerFailedError" if one == rank else "DeadlineError" for one in range(2)], "weights between rank", 2 * TIMEOUT + SLACK)


def several_silent() -> Told:
    """Ranks 1 and 3 stand still when they have received some of many messages."""
    if dist.get_rank() in (1, 3):
        receive, count = stream.Client.receive, iter(range(10**9))

        def received(side: stream.Client, data: torch.Tensor, sender: int) -> Any:
            if next(count) == 1:
                time.sleep(3 * TIMEOUT + 1)
            return receive(side, data, sender)

        with mock.patch.object(stream, "_MESSAGE", 32), mock.patch.object(stream.Client, "receive", received):
            return materialize(on_rank(0, good_state()), again=False)
    with mock.patch.object(stream, "_MESSAGE", 32):
        return materialize(on_rank(0, good_state()), again=False)


def test_several_silent_ranks_cost_the_others_one_timeout_and_are_named() -> None:
    told = ranks.run(4, several_silent, may_die=True)
    check([told[0], told[2]], ["DeadlineError"] * 2, f"within {TIMEOUT:g} s", TIMEOUT + SLACK)
    assert "weights between rank 0 and rank 1 did not arrive" in told[0][1] or "rank 0 and rank 3" in told[0][1]
    assert "rank(s) [1, 3] did not take part" in told[2][1]


def test_a_rank_that_died() -> None:
    told = ranks.run(2, before_the_call, die, False, may_die=True)
    check(told[:1], ["DeadlineError"], "rank(s) [1] did not take part", TIMEOUT + SLACK)


def where_rank_0_keeps_the_store() -> Told:
    """As torch does without a launcher."""
    meeting, world, rank = dist.distributed_c10d._get_default_store(), dist.get_world_size(), dist.get_rank()
    if rank == 0:
        listener = socket.create_server(("127.0.0.1", 0))
        port = listener.getsockname()[1]
        store = dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())
        meeting.set("port", str(port))
    else:
        store = dist.TCPStore("127.0.0.1", int(meeting.get("port")), is_master=False)
    dist.barrier()
    dist.destroy_process_group()
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
    meeting.set(f"there/{rank}", "")
    meeting.wait([f"there/{one}" for one in range(world)])
    if rank == 0:
        die()
    return materialize(good_state(), again=False)


def test_a_rank_that_dies_with_the_store() -> None:
    told = ranks.run(3, where_rank_0_keeps_the_store, may_die=True)
    check(told[1:], ["PeerFailedError"] * 2, "the store of the process group is gone", TIMEOUT + SLACK)
