"""checkpoint.json: what a step's directory holds, and whether all of it is there. docs/checkpoints.md has the format.

Every file beside it carries the same number of the save that wrote it, so that parts of two saves never pass for one.
"""

from __future__ import annotations

import errno
import itertools
import json
import os
import stat
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from shardow import _core, errors
from shardow.base.checks import unsupported
from shardow.files import paths

NAME = "checkpoint.json"
FORMAT, VERSION = "shardow.checkpoint", 1
SAVE, STEP = "shardow.save", "shardow.step"  # in the metadata of every file
MODEL, OPTIMIZER, STATE = "model.safetensors", "optimizer.safetensors", "state.safetensors"
_PARTS = ("model", "averages", "optimizer", "scheduler")
_CRC = "crc32"


@dataclass(frozen=True)
class Manifest:
    """``averages``: {decay: file}; trees are those of base/plain.py, with {"$tensor": name} and the like for what is in
    the files.
    """

    step: int
    save: str
    world_size: int
    files: list[str]
    model: str | None = None
    averages: dict[str, str] = field(default_factory=dict)
    optimizer: dict[str, Any] = field(default_factory=dict)
    scheduler: dict[str, Any] = field(default_factory=dict)
    state: Any = field(default_factory=dict)
    # Names of the classes of optimizers and schedulers.
    kinds: dict[str, dict[str, str]] = field(default_factory=dict)

    def text(self) -> str:
        """With a checksum of what is before it as the last key."""
        values = {"format": FORMAT, "version": VERSION, **vars(self)}
        return json.dumps({**values, _CRC: _checksum(values)})

    def check(self, opened: Sequence[_core.Checkpoint], where: str) -> dict[str, _core.Checkpoint]:
        """Returns the files by name. Raises CorruptError where one is of another save."""
        by_name = dict(zip(self.files, opened, strict=True))
        for name, file in by_name.items():
            if file.metadata.get(SAVE) != self.save:
                step = file.metadata.get(STEP, "none of these checkpoints")
                raise errors.make(
                    "corrupt",
                    f"{where}/{name} is of another save (of step {step}) than its {NAME}; restore another step",
                )
        return by_name


def parts_of(owner: object) -> set[str]:
    """The parts that a manifest has, or that a call was given."""
    return {name for name in _PARTS if getattr(owner, name)}


def directory_of(step: int) -> str:
    return paths.name_of("step", step)


def steps_in(directory: Path) -> list[int]:
    """Of what has such a name, whatever is in it; the newest first."""
    return paths.numbered(directory, "step")


def text_of(path: str | Path, inside: int | None = None) -> str | None:
    """The text of a regular file, of the directory ``inside`` where that is given; None where there is none. Opens
    nothing that waits for others, as a FIFO does.
    """
    flags = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | (0 if inside is None else os.O_NOFOLLOW)
    try:
        file = os.open(path, flags, dir_fd=inside)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        code = "corrupt" if error.errno in (errno.ELOOP, errno.ENXIO) else "io"  # a link, a socket
        raise errors.make(code, f"{path} can't be read: {error.strerror}", error.errno or 0) from None
    try:
        if not stat.S_ISREG(os.fstat(file).st_mode):
            raise errors.make("corrupt", f"{path} is no file; a checkpoint's list of parts is one")
        with open(file, encoding="utf-8", closefd=False) as opened:
            return opened.read()
    except UnicodeDecodeError as error:
        raise errors.make("corrupt", f"{path} is no list of a checkpoint's parts: {error}") from None
    finally:
        os.close(file)


def parse(text: str, where: str) -> Manifest:
    """Raises CorruptError for what is no manifest, NotImplementedError for that of a later version."""
    try:
        found = json.loads(text)
        # What the engine calls files of a save into a directory that was there follows the checksum.
        written = {key: found[key] for key in itertools.takewhile(lambda key: key != _CRC, found)}
        is_as_written = found.pop(_CRC, None) in (None, _checksum(written))
        if found.pop("format") != FORMAT:
            raise ValueError("another format")
        if found.pop("version") != VERSION:
            raise unsupported(f"{where}/{NAME} is of a later version of its format; a newer shardow reads it")
        if not is_as_written:
            raise ValueError(
                f"its checksum differs, so it was changed or damaged; without its last key, {_CRC}, it is taken as it "
                "is"
            )
        # Leaves out what a later shardow writes beside it in the same version of the format.
        known = {one.name for one in fields(Manifest)}
        one = Manifest(**{key: value for key, value in found.items() if key in known})
        if not _is_understood(one):
            raise ValueError("a value is none that it may have")
        return one
    except errors.Error:
        raise
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise errors.make("corrupt", f"{where}/{NAME} is no list of a checkpoint's parts: {error}") from None


def _checksum(values: Mapping[str, Any]) -> str:
    return f"{zlib.crc32(json.dumps(values, allow_nan=False).encode()):08x}"


def _is_understood(one: Manifest) -> bool:
    def texts(values: Any) -> bool:
        return all(isinstance(value, str) for value in values)

    named = {one.model, *one.averages.values(), OPTIMIZER if one.optimizer else None, STATE} - {None}
    trees = one.optimizer.values()
    return (
        all(isinstance(number, int) for number in (one.step, one.world_size))
        and texts(one.files)
        and all(os.path.basename(name) == name and name.endswith(".safetensors") for name in one.files)
        and named <= {*one.files}
        and len({*one.files}) == len(one.files)
        and all(texts(group["params"]) for tree in trees for group in tree["groups"])
        and all(isinstance(state, dict) for tree in trees for state in tree["state"].values())
        and all(isinstance(tree, dict) for tree in (one.scheduler, one.state, *one.kinds.values()))
    )


def read(directory: Path) -> Manifest | None:
    """None where there is none: no checkpoint of ours, or one that is being removed."""
    text = text_of(directory / NAME)
    if text is None:
        return None
    found = parse(text, str(directory))
    if directory.name != directory_of(found.step):
        raise errors.make(
            "corrupt",
            f"{directory} holds step {found.step}: it was renamed, or is a copy; its name is "
            f"{directory_of(found.step)}",
        )
    return found


def whole(directory: Path) -> Manifest | None:
    """read(), after looking at the header and length of every part; None where there is nothing. Raises for what is
    damaged.
    """
    found = read(directory)
    if found is not None:
        found.check(_core.Checkpoint.open_files(directory, found.files), str(directory))
    return found


def missing(directory: Path, step: int | None) -> Exception:
    """That ``step``, or any, is not there, with those that are."""
    there = ", ".join(map(str, steps_in(directory)[:8])) or "none"
    what = "no whole checkpoint" if step is None else f"no checkpoint of step {step}"
    return errors.make("not_found", f"{directory} has {what}; steps there: {there}")
