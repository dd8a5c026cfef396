"""Users' paths, checked and with ``~`` understood, before anything is read or written."""

from __future__ import annotations

import os
import re

from shardow import errors
from shardow.base.checks import invalid

StrPath = str | os.PathLike[str]

#: Endings of other formats' files: a directory of such a name would be a surprise.
_OTHERS = {".pt", ".pth", ".pkl", ".pickle", ".bin", ".ckpt", ".npz", ".npy", ".h5", ".onnx", ".gguf", ".tar", ".json"}


def to_read(path: StrPath) -> str:
    """Raises ValueError for what is no path."""
    if not isinstance(path, (str, os.PathLike)) or not isinstance(os.fspath(path), str):
        raise invalid(f"{path!r} is a {type(path).__name__}, not a path")
    text = os.fspath(path)
    if not text or "\0" in text:
        raise invalid(f"{text!r} is no path: it {'is empty' if not text else 'has a NUL in it'}")
    try:
        os.fsencode(text)
    except UnicodeEncodeError:
        raise invalid(f"{text!r} is no path: it has a character that no file name can have") from None
    return os.path.expanduser(text)


def to_write(path: StrPath) -> str:
    """Also raises for the name of another format's file, unless it is a directory already. The path is absolute: what
    is written in the background goes where the call meant, whatever directory the process stands in by then.
    """
    text = os.path.join(os.getcwd(), to_read(path))
    stem, ending = os.path.splitext(text)
    if ending.lower() in _OTHERS and not os.path.isdir(text):
        instead = (
            f"Give {stem}.safetensors for one file, {stem} for a directory, or torch.save() a state_dict() for {ending}"
        )
        raise invalid(f"{text}: what is written is safetensors. {instead}")
    return text


def name_of(word: str, number: int) -> str:
    """Returns the name of a directory that is one of a series: step-000001000."""
    return f"{word}-{number:09}"


def numbered(directory: StrPath, word: str) -> list[int]:
    """Returns the numbers of what name_of() has named in a directory, the highest first."""
    try:
        names = os.listdir(directory)
    except FileNotFoundError:
        return []
    except OSError as error:
        raise errors.make("io", f"{directory} can't be looked into: {error.strerror}", error.errno or 0) from None
    matches = (re.fullmatch(rf"{word}-([0-9]{{9}}|[1-9][0-9]{{9,}})", name) for name in names)
    return sorted((int(match[1]) for match in matches if match), reverse=True)
