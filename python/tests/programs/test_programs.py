"""Random programs on real ranks beside a plain oracle: never a difference that nobody says, never a hang. A program that fails is printed in the fewest lines that still fail."""

from __future__ import annotations

import contextlib
import os
import tempfile
from pathlib import Path

import models
import pytest
import ranks

import shardow
from programs import machine
from programs.story import Line, Oracle, Program, draw

COUNT = 200 if os.environ.get("SHARDOW_ALL") else 20
ATTEMPTS = 24  # at a shorter program that fails too; each costs new processes


def run(program: Program) -> None:
    with tempfile.TemporaryDirectory() as folder:
        oracle = Oracle({name: p.detach() for name, p in models.make().named_parameters()})
        for world, lines in program.parts:
            killed = bool(lines) and lines[-1][0] == "killed"
            answers = ranks.run(world, machine.run, program.kind, lines, oracle, folder, timeout=90, may_die=killed)
            oracle = _after_the_kill(oracle, lines, Path(folder)) if killed else answers[0]


def _after_the_kill(oracle: Oracle, lines: tuple[Line, ...], folder: Path) -> Oracle:
    """What the ranks can't tell any more. The file is the old one or the new one, whole."""
    oracle.begin()
    for line in lines[:-1]:
        oracle.follow(line)
    path = lines[-1][2]
    before = oracle.files.pop(path, None)
    oracle.follow(lines[-1])
    if not (folder / path).exists():
        assert before is None, f"no checkpoint is left at {path}"
        del oracle.files[path]
        return oracle
    with shardow.open(folder / path) as opened:
        found = {name: opened[name] for name in opened}
    for candidate in (before, oracle.files[path]):
        with contextlib.suppress(AssertionError):
            machine.same(found, candidate[0] if candidate else {}, path)
            oracle.files[path] = candidate
            return oracle
    raise AssertionError(f"{path} holds neither what was there nor what was saved")


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
        shorter = (*program.parts[:part], (world, lines[:at] + lines[at + 1 :]), *program.parts[part + 1 :])
        attempts += 1
        if failure(Program(program.kind, shorter)) is not None:
            program = Program(program.kind, shorter)
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
            f"seed {seed}; after {attempts} attempts to shorten it this is left:\n{least}\n\n{failure(least) or error}", pytrace=False
        )
