"""How the command behaves among other programs: pipes, full disks, signals, terminals, closed streams."""

from __future__ import annotations

import contextlib
import json
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
from command import COMMAND, flip, foreign, ours, run, sparse, tensors, told, wait_until_it_waits

import shardow


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
            ["bash", "-c", f"{COMMAND} verify {path} {closed}"],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        assert done.returncode == status, closed
    assert path.read_bytes() == before


@pytest.mark.parametrize("what", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_it_as_that_signal(tmp_path: Path, what: signal.Signals) -> None:
    path = sparse(tmp_path / "a.safetensors", 10**12)  # which takes longer than any patience
    for words in (["verify", path], ["diff", path, path]):
        default = lambda: signal.signal(what, signal.SIG_DFL)  # noqa: E731
        with subprocess.Popen(
            [COMMAND, *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE, preexec_fn=default
        ) as process:
            time.sleep(0.3)
            process.send_signal(what)
            out, error = process.communicate(timeout=30)
        assert process.returncode == -what
        assert (out, error) == (b"", b"")
    assert [one.name for one in tmp_path.iterdir()] == ["a.safetensors"]


def test_files_that_become_shorter_are_never_a_crash(tmp_path: Path) -> None:
    values = tensors(sizes=(3_000_000,))
    for verb in ("diff", "verify") * 10:
        a, b = (ours(tmp_path / f"{name}.safetensors", values) for name in "ab")
        with subprocess.Popen(
            [COMMAND, verb, a, b], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
        ) as process:
            os.truncate(a, 5000)
            _, error = process.communicate(timeout=30)
        assert process.returncode in (0, 1, 4, 6), error


def test_too_many_files_are_opened_one_after_another(tmp_path: Path) -> None:
    values = {f"w{i:03}": np.full(100, i, np.float32) for i in range(60)}
    a, b = (ours(tmp_path / name, values, max_shard_size=400) for name in "ab")
    for few, status in ((14, 0), (5, 6)):
        limited = lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (few, few))  # noqa: B023, E731
        done = subprocess.run(
            [COMMAND, "diff", a, b, "--threads", "1"], capture_output=True, text=True, preexec_fn=limited
        )
        assert done.returncode == status, done.stderr
    assert "Too many open files; this process may have 5 open: raise that (ulimit -n)" in done.stderr


def test_names_with_a_nul_are_shown_whole(tmp_path: Path) -> None:
    a = foreign(tmp_path / "step-1.safetensors", {"a": np.ones(3), "x\0y": np.ones(3)})
    b = foreign(tmp_path / "step-2.safetensors", {"a": np.ones(3), "x\0z": np.ones(3)})
    assert f"only in {a}: x\\x00y\n" in told("diff", a, b, status=1)
    done = run("average", a, b, "-o", tmp_path / "out")
    assert done.returncode == 2
    assert f"'x\\x00y' is missing in {b}; 'x\\x00z' is missing in {a}" in done.stderr
    assert (
        "'x\\x00z' is missing"
        in json.loads(run("average", a, b, "-o", tmp_path / "out", "--json").stdout)["error"]["message"]
    )
    assert "x\\x00y" in told("inspect", a)
    assert "x\0y" in json.loads(told("inspect", a, "--json"))["checkpoints"][0]["tensors"][1]["name"]
    with pytest.raises(ValueError, match=r"'x\\x00y' is missing in .*; 'x\\x00z' is missing in"):
        shardow.merge([a, b], tmp_path / "out")


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
    assert shown.rstrip().endswith(b", 1 tensor")
    assert b"\r\x1b[K" in shown.rsplit(b"diff: ", 1)[1]
    assert b"diff: " not in on_a_terminal([str(COMMAND), "diff", str(path), str(path)], TERM="dumb")


def test_wrong_calls(tmp_path: Path) -> None:
    for words, message in (
        ([], "a verb is required"),
        (["frobnicate"], "no verb 'frobnicate'"),
        (["diff", "a"], "B is required"),
        (["verify", "--threads", "0", "a"], "--threads"),
        (["inspect", "--colour", "a"], "--colour"),
    ):
        done = run(*words)
        assert done.returncode == 2
        assert done.stdout == ""
        assert done.stderr.startswith("shardow: ")
        assert message in done.stderr
        assert "--help" in done.stderr


@pytest.mark.parametrize("verb", ["inspect", "verify", "diff"])
def test_memory_is_bounded_whatever_the_size(tmp_path: Path, verb: str) -> None:
    """Of a sparse file, all of it read."""
    size = (4 if os.environ.get("SHARDOW_ALL") else 1) * 10**9
    path = sparse(tmp_path / "a.safetensors", size, "BF16")
    empty = measured([str(COMMAND), "--version"])[1]
    words = [str(COMMAND), *verb.split(), *[str(path)] * (2 if verb == "diff" else 1)]
    for threads in ([], ["--threads", "64"]) if verb != "inspect" else ([],):
        assert measured([*words, *threads])[1] - empty < 64 << 20


def test_a_signal_while_it_complains_ends_it_as_that_signal(tmp_path: Path) -> None:
    """To a pipe that nobody reads."""
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    with contextlib.suppress(BlockingIOError):
        while True:
            os.write(writing, bytes(4096))
    os.set_blocking(writing, True)
    with subprocess.Popen([COMMAND, "inspect", tmp_path / "none"], stderr=writing) as process:
        wait_until_it_waits(process, "pipe_write")
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == -signal.SIGTERM
    os.close(reading)
    os.close(writing)


def test_threads_change_nothing_that_verify_says(tmp_path: Path) -> None:
    path = ours(tmp_path / "model", tensors(sizes=(3_000_000, 70_000, 5)), max_shard_size=1_000_000)
    flip(path / "model-00001-of-00002.safetensors", -5)
    told = {
        run("verify", path, *words, "--threads", threads).stdout for threads in (1, 4) for words in ([], ["--json"])
    }
    assert len(told) == 2
