"""How the command behaves among other programs: pipes, full disks, signals, terminals, closed streams."""

from __future__ import annotations

import os
import pty
import resource
import signal
import subprocess
import time
from pathlib import Path

import numpy as np
import pytest
from benchmarks.command import measured
from command import COMMAND, flip, foreign, ours, run, sparse, tensors


def many(path: Path) -> Path:
    """More names than a pipe holds."""
    return foreign(path, {f"{'x' * 50}.{i}": np.zeros(1, np.int8) for i in range(5000)})


def test_a_reader_that_leaves_ends_it_quietly(tmp_path: Path) -> None:
    path = many(tmp_path / "a.safetensors")
    for ignored in (False, True):
        with subprocess.Popen(
            [COMMAND, "inspect", path], stdout=subprocess.PIPE, stderr=subprocess.PIPE, restore_signals=not ignored
        ) as process:
            assert process.stdout is not None
            assert process.stderr is not None
            process.stdout.readline()
            process.stdout.close()
            assert process.stderr.read() == b""
        assert process.returncode == -signal.SIGPIPE


def test_a_full_disk_behind_standard_output_is_an_error(tmp_path: Path) -> None:
    for path in (many(tmp_path / "a.safetensors"), ours(tmp_path / "b.safetensors", tensors())):
        with open("/dev/full", "w") as full:
            done = subprocess.run([COMMAND, "inspect", path], stdout=full, stderr=subprocess.PIPE, text=True)
        assert done.returncode == 7
        assert "standard output: cannot write: No space left on device" in done.stderr


def test_closed_streams(tmp_path: Path) -> None:
    path = ours(tmp_path / "a.safetensors", tensors())
    before = path.read_bytes()
    for closed, status in (("<&-", 0), (">&-", 6), ("2>&-", 0), ("<&- >&- 2>&-", 6)):
        done = subprocess.run(
            ["bash", "-c", f"{COMMAND} verify --manifest=write {path} {closed}"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        assert done.returncode == status, closed
        assert (tmp_path / "a.safetensors.sha256").read_text().endswith("  a.safetensors\n")
    assert path.read_bytes() == before


def test_a_manifest_on_a_full_disk_leaves_the_old_one(tmp_path: Path) -> None:
    path = foreign(tmp_path / "a.safetensors", tensors())
    manifest = tmp_path / "a.safetensors.sha256"
    manifest.write_text("old\n")
    limited = lambda: (signal.signal(signal.SIGXFSZ, signal.SIG_IGN), resource.setrlimit(resource.RLIMIT_FSIZE, (10, 10)))  # noqa: E731
    done = subprocess.run([COMMAND, "verify", "--manifest=write", path], capture_output=True, text=True, preexec_fn=limited)
    assert done.returncode == 6
    assert manifest.read_text() == "old\n"
    assert sorted(one.name for one in tmp_path.iterdir()) == ["a.safetensors", "a.safetensors.sha256"]


@pytest.mark.parametrize("what", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_it_as_that_signal(tmp_path: Path, what: signal.Signals) -> None:
    path = sparse(tmp_path / "a.safetensors", 10**12)  # which takes longer than any patience
    for words in (["verify", path], ["diff", path, path], ["verify", "--manifest", path]):
        default = lambda: signal.signal(what, signal.SIG_DFL)  # noqa: E731
        with subprocess.Popen([COMMAND, *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE, preexec_fn=default) as process:
            time.sleep(0.3)
            process.send_signal(what)
            out, error = process.communicate(timeout=30)
        assert process.returncode == -what
        assert (out, error) == (b"", b"")
    assert [one.name for one in tmp_path.iterdir()] == ["a.safetensors"]


def on_a_terminal(words: list[str], **environment: str) -> bytes:
    """What a terminal is shown of both streams."""
    master, slave = pty.openpty()
    process = subprocess.Popen(words, stdout=slave, stderr=slave, env={"PATH": os.environ["PATH"], **environment})
    os.close(slave)
    shown = b""
    while True:
        try:
            block = os.read(master, 65536)
        except OSError:
            break
        if not block:
            break
        shown += block
    os.close(master)
    process.wait(timeout=60)
    return shown


def test_colours_are_for_terminals_that_want_them(tmp_path: Path) -> None:
    path = ours(tmp_path / "a.safetensors", tensors())
    flip(path, -1)
    words = [str(COMMAND), "verify", str(path)]
    assert b"\x1b[31mFAILED\x1b[0m" in on_a_terminal(words, TERM="xterm")
    assert b"\x1b[31m" in on_a_terminal(words, TERM="xterm", NO_COLOR="")
    for no in ({"NO_COLOR": "1", "TERM": "xterm"}, {"TERM": "dumb"}):
        assert b"\x1b[31m" not in on_a_terminal(words, **no)
    assert "\x1b" not in run("verify", path, TERM="xterm").stdout


def test_progress_is_for_terminals_and_goes_away(tmp_path: Path) -> None:
    path = sparse(tmp_path / "a.safetensors", 1_500_000_000)
    shown = on_a_terminal([str(COMMAND), "diff", "--threads", "1", str(path), str(path)], TERM="xterm")
    assert b"diff: " in shown
    assert b"of 3.00 GB" in shown
    assert shown.rstrip().endswith(b"tensors")
    assert b"\r\x1b[K" in shown.rsplit(b"diff: ", 1)[1]
    assert b"diff: " not in on_a_terminal([str(COMMAND), "diff", str(path), str(path)], TERM="dumb")


def test_wrong_calls(tmp_path: Path) -> None:
    for words, message in (
        ([], "required"),
        (["frobnicate"], "no verb 'frobnicate'"),
        (["diff", "a"], "B is required"),
        (["verify", "--threads", "0", "a"], "--threads"),
        (["verify", "--manifest=maybe", "a"], "--manifest"),
        (["inspect", "--colour", "a"], "--colour"),
    ):
        done = run(*words)
        assert done.returncode == 2
        assert done.stdout == ""
        assert done.stderr.startswith("shardow: ")
        assert message in done.stderr
        assert "--help" in done.stderr


@pytest.mark.parametrize("verb", ["verify", "diff"])
def test_memory_is_bounded_whatever_the_size(tmp_path: Path, verb: str) -> None:
    """Of a sparse file, all of it read."""
    size = (4 if os.environ.get("SHARDOW_ALL") else 1) * 10**9
    path = sparse(tmp_path / "a.safetensors", size, "BF16")
    empty = measured([str(COMMAND), "--version"])[1]
    assert measured([str(COMMAND), verb, *[str(path)] * (2 if verb == "diff" else 1)])[1] - empty < 64 << 20
