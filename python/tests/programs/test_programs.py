"""Random programs on real ranks beside a plain oracle: never a difference that nobody says, never a hang.

A program that fails is printed in the fewest lines that still fail.
"""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import models
import pytest
import quick
import ranks
import torch

import shardow
from programs import machine
from programs.other_job import Marks, OtherJobs, version
from programs.story import Line, Oracle, Program, draw
from programs.two_jobs import next_equal

COUNT = 200 if os.environ.get("SHARDOW_ALL") else 6
ATTEMPTS = 24  # at a shorter program that fails too; each costs new processes


def run(program: Program) -> None:
    with quick.folder() as folder:
        oracle = Oracle({name: p.detach() for name, p in models.make().named_parameters()})
        for number, (world, lines) in enumerate(program.parts):
            files, marks = folder / "files", folder / f"marks{number}"
            files.mkdir(exist_ok=True)
            marks.mkdir()
            killed = bool(lines) and lines[-1][0] == "killed"
            others = OtherJobs(lines, files, marks)
            try:
                answers = ranks.run(
                    world, machine.run, program, lines, oracle, str(files), str(marks), timeout=90, may_die=killed
                )
            finally:
                for at in range(len(lines)):
                    Marks(marks, at).make("enough")
                others.end()
            oracle = _after_the_kill(lines, files, Marks(marks, len(lines) - 1)) if killed else answers[0]


def _after_the_kill(lines: tuple[Line, ...], folder: Path, marks: Marks) -> Oracle:
    """What the ranks can't tell any more. The file is the old one, the new one, or the other job's, whole."""
    oracle: Oracle = torch.load(marks.path("oracle"), weights_only=False)
    _, which, path, _, _, other = lines[-1]
    versions = [oracle.saved(which)] + ([oracle.files[path]] if path in oracle.files and not other else [])
    if other:
        versions += [version(other[1], other[0], number) for number in range(marks.versions())]
    oracle.killed.add(path)
    if not (folder / path).exists():
        assert not other, f"no checkpoint is left at {path}, to which another job saved"
        assert path not in oracle.files, f"no checkpoint is left at {path}"
        return oracle
    with shardow.open(folder / path) as opened:
        found = {name: opened[name] for name in opened}
    oracle.files[path] = next_equal(versions, found, f"{path} holds nothing that was saved there")
    return oracle


def failure(program: Program) -> Exception | None:
    try:
        run(program)
    except Exception as error:
        return error
    return None


def shortest(program: Program) -> tuple[Program, int]:
    """Without one line after the other, as long as it still fails."""
    attempts, part, at = 0, 0, 0
    while part < len(program.parts) and attempts < ATTEMPTS:
        world, lines = program.parts[part]
        if at >= len(lines):
            part, at = part + 1, 0
            continue
        parts = (*program.parts[:part], (world, lines[:at] + lines[at + 1 :]), *program.parts[part + 1 :])
        shorter = replace(program, parts=parts)
        attempts += 1
        if failure(shorter) is not None:
            program = shorter
        else:
            at += 1
    return program, attempts


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("seed", range(COUNT))
def test_a_random_program_does_what_the_oracle_does(seed: int) -> None:
    program = draw(seed)
    error = failure(program)
    if error is not None:
        least, attempts = shortest(program)
        pytest.fail(
            f"seed {seed}; after {attempts} attempts to shorten it this is left:\n{least}\n\n{failure(least) or error}",
            pytrace=False,
        )
