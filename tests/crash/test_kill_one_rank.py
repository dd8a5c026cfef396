"""kill -9 at every step of a save by real processes over torch.distributed, of one rank or of all.

The path has one version, whole; survivors agree, in time; the next save clears away.
"""

from __future__ import annotations

import itertools
import os
import random
import socket
import subprocess
import tempfile
import threading
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch.distributed as dist
from versions import FILE_BYTES, OTHERS, strays, version_at
from zygote import Outcome, Save, Zygote

ALL = bool(os.environ.get("SHARDOW_ALL"))
STRIDE = 1 if ALL else 29  # of the steps
RANDOM_KILLS = 150 if ALL else 8  # of each form

WORLD, MIDDLE = 3, 1
# of saves in which somebody dies; without that they take 0.05 s, and 2 s more where torch looks up names in vain
TIMEOUT = 4.0
GRACE = 3.0  # seconds beyond it, of a busy machine
LANES = 8  # rounds at once: most of a round is waiting for the timeout

FORMS = ["file", "directory"]


@dataclass(frozen=True)
class Kill:
    """Of ``victim`` at its call number ``step``, and with ``everyone`` of all ranks at that instant."""

    victim: int
    step: int
    everyone: bool = False


@dataclass(frozen=True)
class Round:
    """What a kill left, after it was found to be allowed."""

    kill: Kill
    died: bool  # the victim; it does not where it has fewer calls
    said: set[str]  # by survivors
    published: bool  # the new version
    leftovers: list[str]


class Ranks:
    """Starts rounds. The store that their ranks meet in lives here, and outlives them all as a launcher's does."""

    def __init__(self, zygote: Zygote) -> None:
        self._zygote = zygote
        # Torch's own listener is of IPv6, and its store stands still while it looks up the name of ::ffff:127.0.0.1;
        # that of 127.0.0.1 is in every /etc/hosts.
        listener = socket.create_server(("127.0.0.1", 0))
        port = listener.getsockname()[1]
        self._store = dist.TCPStore(
            "127.0.0.1", port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
        )
        self._rounds = itertools.count()

    def save(self, path: Path, version: int, timeout: float = 30.0, kill: Kill | None = None) -> list[Outcome]:
        kill = kill or Kill(0, -1)
        limit = None if path.suffix else FILE_BYTES
        name = f"round{next(self._rounds)}"
        return self._zygote.run(
            Save(name, self._store.port, WORLD, path, version, timeout, limit, kill.victim, kill.step, kill.everyone)
        )


class Place:
    """A path with a checkpoint, which one save after the other replaces."""

    def __init__(self, ranks: Ranks, folder: Path, form: str) -> None:
        self.path = folder / ("model.safetensors" if form == "file" else "model")
        self._ranks, self._version = ranks, 0
        folder.mkdir()
        if form == "directory":
            for name, content in OTHERS.items():
                (self.path / name).parent.mkdir(parents=True, exist_ok=True)
                (self.path / name).write_bytes(content)
        self.save()

    def save(self) -> list[Outcome]:
        """Undisturbed."""
        self._version += 1
        outcomes = self._ranks.save(self.path, self._version)
        assert [one.said for one in outcomes] == ["saved"] * WORLD, outcomes
        assert version_at(self.path) == self._version
        assert self._beside() == []
        assert self.path.is_file() or strays(self.path) == []
        return outcomes

    def save_and_kill(self, kill: Kill) -> Round:
        self._version += 1
        outcomes = self._ranks.save(self.path, self._version, TIMEOUT, kill)
        said = [(one.said, one.message, one.seconds) for one in outcomes]
        told = f"{kill}: {said}, the victim's last calls {outcomes[kill.victim].calls[-3:]}"
        version = version_at(self.path)
        assert version in (self._version - 1, self._version), told
        survivors = [one for one in outcomes if one.said != "killed"]
        died = outcomes[kill.victim].said == "killed"
        found = Round(kill, died, {one.said for one in survivors}, version == self._version, self._beside())
        assert died or len(survivors) == WORLD, told
        assert kill.everyone or len(survivors) >= WORLD - 1, told
        assert all(one.seconds < TIMEOUT + GRACE for one in survivors), told
        check(found, zero_lives=outcomes[0].said != "killed", told=told)
        self.save()
        return found

    def _beside(self) -> list[str]:
        return sorted(entry.name for entry in self.path.parent.iterdir() if entry != self.path)


def check(found: Round, zero_lives: bool, told: str) -> None:
    """A save that cannot have succeeded everywhere is the same error on all who live to see it.

    One that succeeded for anyone is published.
    """
    if not found.died:
        assert found.said == {"saved"}, told
    elif found.kill.everyone:
        assert found.said <= {"saved"}, told  # and ended, before the others died
    else:
        assert found.said in ({"saved"}, {"DeadlineError"}, {"PeerFailedError"}), told
    assert found.published or "saved" not in found.said, told
    assert not (found.leftovers and zero_lives), f"rank 0 lives, and left {found.leftovers}; {told}"


def play(ranks: Ranks, folder: Path, form: str, kills: Iterable[Kill], to_survival: bool = False) -> list[Round]:
    """A round for each kill, several at once, each in a place of its own; with ``to_survival`` until a victim has come
    through.
    """
    stop, lock, remaining = threading.Event(), threading.Lock(), iter(kills)

    def take() -> Kill | None:
        with lock:
            return None if stop.is_set() else next(remaining, None)

    def lane(number: int) -> list[Round]:
        rounds: list[Round] = []
        try:
            place = Place(ranks, folder / f"lane{number}", form)
            while (kill := take()) is not None:
                rounds.append(place.save_and_kill(kill))
                if to_survival and not rounds[-1].died:
                    stop.set()
        except BaseException:
            stop.set()
            raise
        return rounds

    with ThreadPoolExecutor(LANES) as pool:
        return sorted(itertools.chain(*pool.map(lane, range(LANES))), key=lambda one: one.kill.step)


def every_step(ranks: Ranks, folder: Path, form: str, victim: int, everyone: bool) -> list[Round]:
    """From the first call on, until there are no more."""
    rounds = play(
        ranks, folder, form, (Kill(victim, step, everyone) for step in itertools.count(0, STRIDE)), to_survival=True
    )
    assert [one.kill.step for one in rounds] == [i * STRIDE for i in range(len(rounds))]
    assert not rounds[-1].died
    return rounds


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    die = tmp_path_factory.mktemp("die") / "die.so"
    subprocess.run(["cc", "-shared", "-fPIC", "-o", die, Path(__file__).with_name("die.c")], check=True)
    zygote = Zygote(die)
    yield Ranks(zygote)
    zygote.stop()


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """In memory where there is some to write to: a kill loses nothing of either, and a disk that others use too may
    take longer to flush than a save has time for here."""
    memory = Path("/dev/shm")
    if not os.access(memory, os.W_OK):
        yield tmp_path
        return
    with tempfile.TemporaryDirectory(dir=memory) as made:
        yield Path(made)


def test_what_publishes_a_checkpoint_is_among_the_steps(ranks: Ranks, folder: Path) -> None:
    for form, in_place in [("file", "rename model.safetensors"), ("directory", "rename model.safetensors.index.json")]:
        calls = [one.calls for one in Place(ranks, folder / form, form).save()]
        assert in_place in calls[0]
        for kind in ("send", "open", "pwrite", "fsync", "close"):
            assert all(any(call.split()[0] == kind for call in of_one) for of_one in calls), kind


@pytest.mark.timeout(900 if ALL else 120)
@pytest.mark.parametrize("victim", [0, MIDDLE])
@pytest.mark.parametrize("form", FORMS)
def test_a_rank_killed_at_any_step_leaves_one_whole_version_and_the_same_error_everywhere(
    form: str, victim: int, ranks: Ranks, folder: Path
) -> None:
    rounds = every_step(ranks, folder, form, victim, everyone=False)
    assert any(one.said == {"DeadlineError"} and not one.published for one in rounds)
    assert any(one.leftovers for one in rounds) == (victim == 0)  # some kills fell between the first file and the last


@pytest.mark.timeout(900 if ALL else 120)
@pytest.mark.parametrize("form", FORMS)
def test_all_ranks_killed_at_any_step_leave_one_whole_version(form: str, ranks: Ranks, folder: Path) -> None:
    rounds = every_step(ranks, folder, form, victim=0, everyone=True)
    assert any(one.leftovers and not one.said for one in rounds)


@pytest.mark.timeout(900 if ALL else 120)
@pytest.mark.parametrize("form", FORMS)
def test_random_kills_of_random_ranks_leave_one_whole_version(form: str, ranks: Ranks, folder: Path) -> None:
    rng = random.Random(form)
    steps = [len(one.calls) for one in Place(ranks, folder / "undisturbed", form).save()]
    victims = [rng.randrange(WORLD) for _ in range(RANDOM_KILLS)]
    rounds = play(
        ranks, folder, form, [Kill(victim, rng.randrange(steps[victim]), rng.random() < 0.3) for victim in victims]
    )
    assert len(rounds) == RANDOM_KILLS
    assert sum(one.died for one in rounds) > RANDOM_KILLS / 2
