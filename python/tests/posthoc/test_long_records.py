"""A few bytes of a file may say that there were many updates: what that takes is bounded, and ends at Ctrl-C."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import profile_oracle as oracle
import pytest
import snapshot_runs as runs
from safetensors import safe_open
from safetensors.numpy import save_file

from shardow import posthoc

COMMAND = Path(__file__).parents[3] / "build" / "release" / "shardow"


def pretend(directory: Path, updates: int) -> None:
    """A snapshot of a run that made so many."""
    runs.run(directory / "short", runs.powers(0.05, 0.1), range(1, 11), every=10)
    where = directory / "long" / f"snapshot-{updates:09}"
    where.mkdir(parents=True)
    for file in (directory / "short" / "snapshot-000000010").glob("*.safetensors"):
        with safe_open(file, "numpy") as opened:
            tensors, told = {name: opened.get_tensor(name) for name in opened.keys()}, opened.metadata()  # noqa: SIM118
        record, state = (json.loads(told[key]) for key in ("shardow.snapshot", "shardow.state"))
        record["segments"][0] |= {"run": "one", "updates": [[1, 1, updates]]}
        state |= {"step": updates, "updates": updates, "applied_step": updates}
        kept = {key: text for key, text in told.items() if not key.startswith("shardow.crc")}
        save_file(
            tensors,
            where / file.name,
            {**kept, "shardow.snapshot": json.dumps(record), "shardow.state": json.dumps(state)},
        )
    shutil.rmtree(directory / "short")


def shares(sigma_rel: float, last: int, steps: int) -> oracle.Vector:
    """The profile at ``last``, as (1 - d_i) d_(i+1) ... d_last."""
    decay = np.array([oracle.power_decay(sigma_rel)(n) for n in range(1, last + 1)])
    after = np.append(np.cumprod(decay[::-1])[::-1], 1.0)  # d_i ... d_last
    return np.pad(np.append(after[0], (1 - decay) * after[1:]), (0, steps - last))


def test_updates_go_through_in_pieces(tmp_path: Path) -> None:
    """More of them than are held at once, in pieces whose borders are no snapshot's."""
    last = 2 * 16384 + 77
    for updates in (9000, 16384, last):
        pretend(tmp_path, updates)
    found = posthoc.plan(tmp_path / "long", 0.14)
    wanted = shares(0.14, last, last)
    off = sum(one.coefficient * shares(float(one.key[16:-1]), one.step, last) for one in found.terms) - wanted
    assert len(found.terms) == 6
    assert found.residual == pytest.approx(float(np.linalg.norm(off) / np.linalg.norm(wanted)), rel=1e-6)
    assert found.variation == pytest.approx(float(np.abs(off).sum() / 2), rel=1e-6)


def test_more_than_anybody_makes_is_refused(tmp_path: Path) -> None:
    pretend(tmp_path, 200_000_000)
    with pytest.raises(NotImplementedError, match="more than 100000000 updates"):
        posthoc.plan(tmp_path / "long", 0.08)


@pytest.mark.parametrize("way", ["python", "command"])
def test_ctrl_c_ends_it(way: str, tmp_path: Path) -> None:
    pretend(tmp_path, 90_000_000)
    program = f"import sys; from shardow import posthoc; print(flush=True); posthoc.sweep({str(tmp_path / 'long')!r})"
    command = (
        [sys.executable, "-c", program]
        if way == "python"
        else [str(COMMAND), "posthoc", str(tmp_path / "long"), "--sweep"]
    )
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    assert process.stdout
    if way == "python":
        process.stdout.readline()
    time.sleep(1)
    assert process.poll() is None
    process.send_signal(signal.SIGINT)
    begin = time.monotonic()
    _, said = process.communicate(timeout=60)
    assert time.monotonic() - begin < 30  # of minutes that it would have taken
    assert process.returncode == -signal.SIGINT or b"KeyboardInterrupt" in said
