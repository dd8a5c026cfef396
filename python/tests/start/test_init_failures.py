"""materialize() where something fails: one typed error on every rank, within the deadline, model and optimizer as they
were.

Then a good call works.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import ranks
import torch
import torch.distributed as dist
from failing import Told, check, good_state, is_good, materialize, on_meta, on_rank
from torch import nn

import shardow

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
    check(
        ranks.run(3, where_rank_1_has_no_file, str(tmp_path)),
        ["IoError"] * 3,
        "a.safetensors: rank 0 found it, and it is not there on ",
    )


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
    # A file that does not fit lists a second name.
    state = {name: tensor for name, tensor in wrong_state(how).items() if name != "head.weight"}
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
    check(
        told,
        ["InvalidArgumentError"] * 3,
        "ranks have different sources: an empty mapping, a mapping, an empty mapping",
    )


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
    check(
        ranks.run(3, fails_on_rank_1, "raises"), ["PeerFailedError", "ZeroDivisionError", "PeerFailedError"], "no fan"
    )
    told = ranks.run(3, fails_on_rank_1, "leaves another shape")
    check(
        told,
        ["PeerFailedError", "InvalidArgumentError", "PeerFailedError"],
        "'layers.0.bias' left it with shape [3], not [4]",
    )


def with_a_foreign_optimizer() -> Told:
    return materialize(good_state(), foreign=on_rank(1, torch.optim.SGD(nn.Linear(2, 2).parameters())))


def test_an_optimizer_that_is_foreign_on_one_rank() -> None:
    check(
        ranks.run(3, with_a_foreign_optimizer),
        ["PeerFailedError", "InvalidArgumentError", "PeerFailedError"],
        "optimizer group 0",
    )


# Sources


# A late rank


# Ranks that die or sleep. Last, since each case makes processes anew
