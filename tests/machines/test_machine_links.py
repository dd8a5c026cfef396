"""Ranks on several machines, over links with a rate: everything works; and a link that fails in the middle of it is a
typed error on every rank, in time, the old checkpoint stays, and processes end."""

from __future__ import annotations

import os
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest
from lab import Answer, Lab
from miniature import Plan
from verbs import VERBS, played, put_first, version_at
from weather import Weather

ALL = bool(os.environ.get("SHARDOW_ALL"))
TIMEOUT = 2.0
GRACE = 4.0  # seconds beyond it, of a busy machine
# seconds that a process may take to end: Python and torch alone take one or two, and ten of them where others work too
END = 30.0
LANES = 4


@dataclass(frozen=True)
class Case:
    """``machine``'s link fails ``how``, before step ``at`` of rank 1's or 2's, as a share of all its steps."""

    verb: str
    machine: int
    how: str
    at: float


def test_every_verb_works_over_links_with_a_rate(tmp_path: Path) -> None:
    path = tmp_path / "shared" / "model"
    with Lab(Plan(tmp_path, hosts=("north", "south", "east") if ALL else ("north", "south"), rate="100mbit")) as lab:
        lab.all_fine(put_first, str(path))
        for verb in VERBS:
            ended = lab.all_fine(played, verb, str(path if verb == "load" else path.with_name(verb)), 30.0)
            assert [one[0][:2] for one in ended] == [("none", "")] * lab.plan.world, (verb, ended)
        assert version_at(path) == 1
        assert version_at(path.with_name("save")) == version_at(path.with_name("async_save")) == 2
        assert all(
            one.fine and one.ended is not None and one.ended < END for one in lab.run(put_first, str(path), last=True)
        )


def fail(case: Case, folder: Path) -> tuple[Case, list[Answer], int]:
    """How the ranks ended, and which version is there."""
    path, teller = folder / "shared" / "model", 2
    with Lab(Plan(folder)) as lab:
        lab.all_fine(put_first, str(path))
        steps = lab.all_fine(played, case.verb, str(path if case.verb == "load" else path.with_name("try")), 30.0)[
            teller
        ][1]
        at = min(int(steps * case.at), steps - 1)
        answers = lab.run(
            played,
            case.verb,
            str(path),
            TIMEOUT,
            teller,
            at,
            told=lambda *_: lab.command(case.how, case.machine),
            last=True,
            timeout=60.0,
        )
    return case, answers, version_at(path)


def wrong_with(case: Case, answers: list[Answer], version: int) -> list[str]:
    """What should not be."""
    if not all(one.fine for one in answers):
        return [str(one.value) for one in answers if not one.fine]
    ended = [one.value[0] for one in answers]
    kinds = [kind for kind, _, _ in ended]
    saved = case.verb in ("save", "async_save") and "none" in kinds
    found = {
        "late": any(seconds > TIMEOUT + GRACE for _, _, seconds in ended),
        "untyped": not set(kinds) <= {"none", "DeadlineError", "PeerFailedError"},
        "unnoticed": set(kinds) == {"none"} and case.at < 1,
        "nobody named": any(
            kind != "none" and "rank" not in message and "store" not in message for kind, message, _ in ended
        ),
        "does not end": any(one.ended is None or one.ended > END for one in answers),
        "half a checkpoint": version not in ((1, 2) if saved else (1,)),
    }
    return [what for what, is_so in found.items() if is_so]


CASES = [
    Case(verb, machine, how, at)
    for verb in VERBS
    for machine in (0, 1)
    for how in ("cut", "off")
    for at in ((0.0, 0.25, 0.4, 0.5, 0.75, 1.0) if ALL else (0.4,))  # 0.4: in the exchange of a swap
]
if not ALL:  # one of each
    FEW = ("async_save", "swap")
    CASES = [case for number, case in enumerate(CASES) if number % 4 == (number // 4) % 4 and case.verb in FEW]


@pytest.mark.timeout(900 if ALL else 120)
def test_a_link_that_fails_in_the_middle_is_an_error_on_every_rank_in_time(tmp_path: Path) -> None:
    with ThreadPoolExecutor(LANES) as pool:
        found = list(pool.map(lambda one: fail(one[1], tmp_path / str(one[0])), enumerate(CASES)))
    wrong = [f"{wrong_with(*one)}: {one}" for one in found if wrong_with(*one)]
    assert not wrong, "\n\n".join(wrong)


def test_links_that_lose_frames_and_hold_them_back_make_calls_slow_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "shared" / "model"
    with Lab(Plan(tmp_path, weather=Weather(delay=0.01, loss=0.02))) as lab:
        lab.all_fine(put_first, str(path))
        for verb in VERBS if ALL else ("save",):
            ended = lab.all_fine(played, verb, str(path if verb == "load" else path.with_name(verb)), 30.0)
            assert [one[0][:2] for one in ended] == [("none", "")] * 4, (verb, ended)
        assert version_at(path.with_name("save")) == 2


def test_links_that_stand_still_for_less_than_the_timeout_are_waited_for(tmp_path: Path) -> None:
    path = tmp_path / "shared" / "model"

    def pause(*_: object) -> None:
        lab.command("weather", Weather(calm=True))
        time.sleep(1.0)
        lab.command("weather", Weather())

    with Lab(Plan(tmp_path, weather=Weather())) as lab:
        lab.all_fine(put_first, str(path))
        for verb in VERBS if ALL else ("stream",):
            ended = lab.all_fine(
                played, verb, str(path if verb == "load" else path.with_name(verb)), 20.0, 2, 3, told=pause
            )
            assert [one[0][:2] for one in ended] == [("none", "")] * 4, (verb, ended)
            assert any(one[0][2] > 0.9 for one in ended), (verb, ended)
