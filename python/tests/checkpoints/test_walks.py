"""Random walks through a run's directory that has entries of other programs wherever Checkpoints looks.

Each walk plants entries of random kinds at random paths, between calls of save(), latest() and restore(). Every call
gives the right result or a shardow.Error within its deadline, a whole step stays whole, and the planted entries stay as
they were. One walk alone: ``python python/tests/checkpoints/test_walks.py SEED 1 FOLDER``.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import random
import shutil
import socket
import stat
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

import shardow

WALKS = 2000 if os.environ.get("SHARDOW_ALL") else 25
CALLS = 12
STEPS = range(1, 6)
TIMEOUT, LATE = 0.2, 10.0  # seconds; a call may be late where the machine is busy
UNPRIVILEGED = 65534
NONCE = "0123456789abcdef"
_BIND, _DETACH = 1 << 12, 2
_libc = ctypes.CDLL(None, use_errno=True)

#: Names in a step's directory that its save writes: it replaces an entry of that name; retention removes a file.
OWN = ("checkpoint.json", "state.safetensors")
#: Names that a save gives and takes away: what a dead one left is removed, and never what such a link leads to.
LEFT = (f".step-00000000{{}}.{NONCE}.tmp", f"step-00000000{{}}/.state.safetensors.{NONCE}.tmp")
OTHERS = (
    "notes",
    b"\xff\xfe",
    "step-00000000{}/notes",
    b"step-00000000{}/\xff\xfe",
    "step-00000000{}/other.safetensors",
    "step-00000000{}/averages.json",
    "step-00000000{}/model.safetensors.index.json",
    ".step-00000000{}.lock.tmp",
    "step-00000000{}",
)


@dataclass
class Walk:
    seed: int
    folder: Path
    is_root: bool
    story: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)
        self.root = self.folder / os.fsdecode(self.random.choice([b"run", b"r\xffn", b"a/b/run"]))
        self.elsewhere = self.folder / "elsewhere"
        (self.elsewhere / "inside").mkdir(parents=True)
        (self.elsewhere / "inside" / "their text").write_text("theirs")
        (self.elsewhere / "file").write_text("theirs")
        self.is_unprivileged = self.is_root and self.random.random() < 0.7
        if self.is_root:
            self.folder.chmod(0o777)
        self.planted: dict[Path, Any] = {self.elsewhere: facts_of(self.elsewhere)}
        self.mounted: list[Path] = []
        self.held: list[int] = []
        self.checkpoints = shardow.Checkpoints(self.root, keep=2, timeout=TIMEOUT)
        self.known: dict[int, int] | None = None
        self.errors: dict[int, str] = {}
        self.value = 0

    def go(self) -> None:
        try:
            if self.random.random() < 0.1:
                self.root.parent.mkdir(parents=True, exist_ok=True)
                self.put(self.root)
            for _ in range(CALLS):
                self.random.choice([self.plant, self.plant, self.save, self.save, self.look])()
        finally:
            for path in self.mounted:
                _libc.umount2(os.fsencode(path), _DETACH)
            for handle in self.held:
                os.close(handle)

    def call(self, what: str, fn: Callable[[], Any]) -> tuple[Any, Exception | None]:
        """(result, None) or (None, its error)."""
        self.story.append(what)
        began, result, error = time.monotonic(), None, None
        with self.as_user(), warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)
            try:
                result = fn()
            except Exception as raised:
                error = raised
        self.story.append(f"  {error!r}" if error else "  done")
        assert error is None or isinstance(error, shardow.Error)
        assert time.monotonic() - began < TIMEOUT + LATE, "late"
        return result, error

    @contextlib.contextmanager
    def as_user(self) -> Any:
        if self.is_unprivileged:
            os.seteuid(UNPRIVILEGED)
        try:
            yield
        finally:
            if self.is_unprivileged:
                os.seteuid(0)

    def whole(self) -> dict[int, int]:
        """The steps that can be restored, with their values."""
        if self.known is None:
            self.known = self.restorable()
        return self.known

    def restorable(self) -> dict[int, int]:
        values = {}
        with self.as_user(), warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)
            for step in STEPS:
                try:
                    state = self.checkpoints.restore(step=step)
                    assert (state["values"] == state["value"]).all()
                    values[step] = state["value"]
                except shardow.Error as error:
                    self.errors[step] = str(error)
        return values

    def save(self) -> None:
        step, before = self.random.choice(STEPS), self.whole()
        asynchronous = self.random.random() < 0.2
        self.value += 1
        state = {"value": self.value, "values": torch.full((50,), float(self.value))}

        def save() -> None:
            saving = self.checkpoints.save(step, state=state, asynchronous=asynchronous)
            if asynchronous:
                saving.wait()  # type: ignore[union-attr]

        _, error = self.call(f"save({step})", save)
        after = self.known = self.restorable()
        own = {self.root / name(f"step-00000000{{}}/{of}", step) for of in OWN}
        left = {self.root / name(of, any_step) for of in LEFT for any_step in STEPS}
        files = {path for path, facts in self.planted.items() if path.name in OWN and facts[0].startswith("0o100")}
        self.check(may_go=left if error else left | own | files)
        if error:
            assert after == before, f"{before} became {after}"
            return
        if step not in after and f"step-00000000{step}/averages.json: cannot open: Perm" in self.errors[step]:
            return  # it may say where the files are, and may not be read
        assert after.get(step) == self.value, f"step {step} is {after.get(step)} after its save: {self.errors}"
        kept = sorted({*before, step}, reverse=True)[:2]
        for each in {*kept, step}:
            assert after.get(each) == {**before, step: self.value}[each], (
                f"step {each} is lost: {before} became {after}"
            )

    def look(self) -> None:
        whole = self.whole()
        newest, error = self.call("latest()", self.checkpoints.latest)
        _, other = self.call("restore()", self.checkpoints.restore)
        if error is None:
            assert newest == max(whole, default=None), f"{whole} are whole"
            assert (other is None) == bool(whole)
        else:  # what may not be read is not passed over
            assert isinstance(error, shardow.errors.IoError)
            assert isinstance(other, shardow.errors.IoError)
            assert self.root in self.planted or "Permission denied" in str(error)
        self.check()

    def check(self, may_go: set[Path] | frozenset[Path] = frozenset()) -> None:
        """Compares what was planted, but for what ``may_go`` or is in it."""
        for path, facts in list(self.planted.items()):
            current = facts_of(path)
            is_a_lock = path.name.endswith(".lock.tmp") and facts[0].startswith("0o100") and not facts[3]
            if current != facts and (is_a_lock or may_go & {path, *path.parents}):
                del self.planted[path]
            else:
                assert current == facts, f"{path!r}: {facts} became {current}"

    def plant(self) -> None:
        of = self.random.choice([*OTHERS, *LEFT, *(f"step-00000000{{}}/{own}" for own in OWN)])
        path = self.root / name(of, self.random.choice(STEPS))
        if path.parent.is_dir() and not any(path.is_relative_to(each) for each in self.planted):
            if os.path.lexists(path) and path.name in OWN and not path.is_dir():
                path.unlink()
                self.known = None
            if not os.path.lexists(path):
                self.put(path)

    def put(self, path: Path) -> None:
        kind = self.random.choice([*KINDS, *(ROOTS_KINDS if self.is_root else ())])
        self.story.append(f"{kind.__name__}({str(path)!r})")
        kind(self, path)
        self.known = None
        self.planted[path] = facts_of(path)


def name(of: str | bytes, step: int) -> str:
    return (os.fsdecode(of) if isinstance(of, bytes) else of).replace("{}", str(step))


def facts_of(path: Path) -> Any:
    """Returns what identifies an entry and its contents; of a directory where calls save, the entries from before."""
    try:
        status = path.lstat()
    except OSError as error:
        return type(error).__name__
    facts: list[Any] = [oct(status.st_mode), status.st_ino, status.st_uid]
    if stat.S_ISLNK(status.st_mode):
        facts.append(os.readlink(path))
    elif stat.S_ISREG(status.st_mode):
        facts += [path.read_bytes(), status.st_mtime_ns, status.st_nlink]
    elif stat.S_ISDIR(status.st_mode):
        names = os.listdir(path)
        of_saves = path.name.startswith(("step-", "run", os.fsdecode(b"r\xff"), "inside"))  # the last behind links
        facts.append({name: facts_of(path / name) for name in names if not of_saves or name.startswith("their")})
    return facts


def file(walk: Walk, path: Path) -> None:
    path.write_bytes(b"theirs")


def empty_file(walk: Walk, path: Path) -> None:
    path.touch()


def nested(walk: Walk, path: Path) -> None:
    path.write_text("[" * 100_000)


def directory(walk: Walk, path: Path) -> None:
    path.mkdir()
    (path / "their file").write_text("theirs")
    (path / "their folder").mkdir()


def link_to_file(walk: Walk, path: Path) -> None:
    path.symlink_to(walk.elsewhere / "file")


def link_to_directory(walk: Walk, path: Path) -> None:
    path.symlink_to(walk.elsewhere / "inside")


def link_to_nothing(walk: Walk, path: Path) -> None:
    path.symlink_to("nothing")


def link_to_itself(walk: Walk, path: Path) -> None:
    path.symlink_to(path.name)


def fifo(walk: Walk, path: Path) -> None:
    os.mkfifo(path)


def listener(walk: Walk, path: Path) -> None:
    folder = os.open(path.parent, os.O_PATH)  # its path may be longer than a socket's may be
    with socket.socket(socket.AF_UNIX) as bound:
        bound.bind(os.fsencode(f"/proc/self/fd/{folder}/{path.name}"))
    os.close(folder)


def locked_file(walk: Walk, path: Path) -> None:
    path.touch()
    walk.held.append(os.open(path, os.O_RDONLY))
    fcntl.flock(walk.held[-1], fcntl.LOCK_EX)


def unreadable_file(walk: Walk, path: Path) -> None:
    file(walk, path)
    path.chmod(0)


def unreadable_directory(walk: Walk, path: Path) -> None:
    directory(walk, path)
    path.chmod(0)


def device(walk: Walk, path: Path) -> None:
    os.mknod(path, stat.S_IFCHR | 0o666, os.makedev(1, 3))


def file_of_another_user(walk: Walk, path: Path) -> None:
    file(walk, path)
    os.chown(path, 1234, 1234)
    path.chmod(0o640)


def directory_of_another_user(walk: Walk, path: Path) -> None:
    directory(walk, path)
    os.chown(path, 1234, 1234)


def mount_of_a_file(walk: Walk, path: Path) -> None:
    path.touch()
    mount(walk, walk.elsewhere / "file", path)


def mount_of_a_directory(walk: Walk, path: Path) -> None:
    path.mkdir()
    mount(walk, walk.elsewhere / "inside", path)


def mount(walk: Walk, source: Path, path: Path) -> None:
    assert _libc.mount(os.fsencode(source), os.fsencode(path), None, _BIND, None) == 0, os.strerror(ctypes.get_errno())
    walk.mounted.append(path)


KINDS = [file, empty_file, nested, directory, link_to_file, link_to_directory, link_to_nothing, link_to_itself, fifo]
KINDS += [listener, locked_file, unreadable_file, unreadable_directory]
ROOTS_KINDS = [device, file_of_another_user, directory_of_another_user, mount_of_a_file, mount_of_a_directory]


def main(first: int, count: int, folder: Path, is_root: bool) -> None:
    os.umask(0o022)
    for seed in range(first, first + count):
        walk = Walk(seed, folder / f"walk{seed}", is_root)
        try:
            walk.go()
        except BaseException as error:
            print(
                *walk.story,
                f"Walk {seed}, as {'another user' if walk.is_unprivileged else 'its owner'}: {error}",
                sep="\n",
            )
            raise
        shutil.rmtree(walk.folder)


def may_mount() -> bool:
    return os.geteuid() == 0 and subprocess.run(["unshare", "--mount", "true"], check=False).returncode == 0


@pytest.mark.parametrize(
    "apart",
    [
        pytest.param([], id="what anybody makes"),
        pytest.param(
            ["unshare", "--mount"],
            id="what root makes",
            marks=pytest.mark.skipif(not may_mount(), reason="mounts, devices and others' files are made by root"),
        ),
    ],
)
def test_whatever_stands_there_calls_are_right_or_refused_and_others_things_stay(
    apart: list[str], quick_folder: Path
) -> None:
    quick_folder.chmod(0o755)
    command = [*apart, sys.executable, __file__, "0", str(WALKS), str(quick_folder), *apart[:1]]
    done = subprocess.run(command, capture_output=True, text=True, timeout=3000)
    assert done.returncode == 0, done.stdout + done.stderr


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), len(sys.argv) > 4)
