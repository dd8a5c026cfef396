"""Which steps stay. What goes loses its checkpoint.json first, so that it never passes for whole, then the files that
carry our mark.

What else is in such a directory stays, and the directory with it. Files are removed through the directory as it was
opened: one that takes its place meanwhile keeps its own.
"""

from __future__ import annotations

import contextlib
import functools
import os
import re
import stat
from pathlib import Path

from shardow import _core, errors
from shardow.base.checks import warn
from shardow.checkpoints import manifest

_LEFT = re.compile(r"\.(step-\d{9,})\.([0-9a-f]{16}|lock)\.tmp")  # beside a step, while it is saved


def _clear(directory: Path) -> None:
    """What saves left whose processes died: their steps may never be saved again. Raises nothing."""
    with contextlib.suppress(OSError):
        for step in sorted({found[1] for found in map(_LEFT.fullmatch, os.listdir(directory)) if found}):
            _core.clear_dead_saves(directory / step)


def retire(directory: Path, just_saved: int, keep: int | None, keep_every: int | None) -> None:
    """Removes what dead saves left, and steps that are older than the newest ``keep`` whole ones, but for
    ``just_saved`` and multiples of ``keep_every``. ``keep`` None: all stay.

    Of one rank. Raises nothing: a checkpoint was saved, whatever becomes of old ones."""
    _clear(directory)
    if keep is None:
        return
    try:
        kept = 0
        for step in manifest.steps_in(directory):
            at = directory / manifest.directory_of(step)
            if kept < keep:
                kept += _is_whole(at)
            elif step != just_saved and not (keep_every and step % keep_every == 0):
                _remove(at)
    except OSError as error:
        warn(f"{directory}: old checkpoints could not be removed: {error}", RuntimeWarning)


def _is_whole(at: Path) -> bool:
    try:
        files = [(entry.name, entry.stat()) for entry in os.scandir(at)]
        marks = frozenset((name, facts.st_ino, facts.st_size, facts.st_mtime_ns) for name, facts in files)
        return _was_whole(at, marks)
    except (errors.Error, OSError):
        return False


@functools.lru_cache(4096)
def _was_whole(at: Path, marks: frozenset[object]) -> bool:
    """Opens a step once, while its files stay what they are."""
    return manifest.whole(at) is not None


def _remove(at: Path) -> None:
    """A step that another job saves anew at this moment stays."""
    _core.clear_dead_saves(at)
    with contextlib.suppress(errors.DeadlineError):
        _core.while_locked(at, functools.partial(_remove_locked, at))


def _remove_locked(at: Path) -> None:
    try:
        inside = os.open(at, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)  # a link is somebody's own
    except OSError:
        return
    try:
        if not _is_file(manifest.NAME, inside, absent=True):
            return
        text, save = _manifest(inside)
        names = [name for name in os.listdir(inside) if _is_ours(at, name, inside, save)]
        if _manifest(inside)[0] != text:  # another job has saved the step again, on storage without locks
            return
        for name in [manifest.NAME, *names] if names or save else ():
            with contextlib.suppress(FileNotFoundError):  # another job's removal, or its save
                os.unlink(name, dir_fd=inside)
            if name == manifest.NAME:
                os.fsync(inside)
    finally:
        os.close(inside)
    with contextlib.suppress(OSError):  # what is others' is still in it
        os.rmdir(at)


def _manifest(inside: int) -> tuple[str | None, str | None]:
    """(the text, the number of its save); None for what is not there, or damaged."""
    text = None
    with contextlib.suppress(errors.Error):
        text = manifest.text_of(manifest.NAME, inside)
        return text, None if text is None else manifest.parse(text, "").save
    return text, None


def _is_file(name: str, inside: int, absent: bool = False) -> bool:
    """Returns whether ``name`` is a regular file, and ``absent`` where nothing has that name. Follows no link."""
    try:
        return stat.S_ISREG(os.stat(name, dir_fd=inside, follow_symlinks=False).st_mode)
    except FileNotFoundError:
        return absent


def _is_ours(at: Path, name: str, inside: int, save: str | None) -> bool:
    """Whether ``save``, or where that is not known any save of a checkpoint, wrote a file."""
    if not name.endswith(".safetensors") or not _is_file(name, inside):
        return False
    try:
        own = _core.Checkpoint.open(Path(f"/proc/self/fd/{inside}") / name).metadata.get(manifest.SAVE)
        return own is not None and save in (None, own)
    except (errors.Error, OSError):
        return False
