"""kill -9 of one rank or of all, at random instants of Checkpoints.save(), synchronous and not: latest() is whole,
every part of one step, and the run goes on from it."""

from __future__ import annotations

import itertools
import multiprocessing
import os
import random
import socket
import time
from pathlib import Path

import pytest
import torch.distributed as dist
import trainer

KILLS = 100 if os.environ.get("SHARDOW_ALL") else 3
WORLD = 2


class Job:
    """Runs of a training script, each of which is killed. The store lives here, as a launcher's does."""

    def __init__(self, root: Path) -> None:
        listener = socket.create_server(("127.0.0.1", 0))
        port = listener.getsockname()[1]
        self._store = dist.TCPStore(
            "127.0.0.1", port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
        )
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(["trainer", "torch.distributed.fsdp"])
        self.root, self._rounds = root, 0

    def run_and_kill(self, asynchronous: bool, seconds: float, victims: list[int], new_steps: int) -> int:
        """Kills ``victims``, then the others, ``seconds`` after ``new_steps`` were saved; returns the last step that
        was reported.
        """
        reported = self._context.Value("q", 0, lock=False)
        self._rounds += 1
        port, began = self._store.port, self.latest()
        arguments = [(rank, WORLD, port, self._rounds, str(self.root), asynchronous, reported) for rank in range(WORLD)]
        processes = [self._context.Process(target=trainer.rank_main, args=one, daemon=True) for one in arguments]
        for process in processes:
            process.start()
        deadline = time.monotonic() + 60
        while reported.value < began + new_steps:
            assert all(process.is_alive() for process in processes)
            assert time.monotonic() < deadline
            time.sleep(0.002)
        time.sleep(seconds)
        for rank in [*victims, *(rank for rank in range(WORLD) if rank not in victims)]:
            processes[rank].kill()
            time.sleep(0.0 if len(victims) == WORLD else seconds)
        for process in processes:
            process.join()
        return int(reported.value)

    def latest(self) -> int:
        """As a reader finds it that is no rank; resumed in this process, and looked at by other tools."""
        reader = trainer.Trainer(self.root, group=False)
        step = reader.resume()
        if step:
            trainer.look_at(self.root / f"step-{step:09}", step)
            assert all((p == step).all() for p in reader.model.parameters())
            assert all((state["exp_avg"] == step).all() for state in reader.optimizer.state.values())
        return step


@pytest.mark.timeout(120 + 6 * KILLS)
@pytest.mark.parametrize("asynchronous", [False, True])
def test_the_latest_step_is_whole_after_every_kill(asynchronous: bool, tmp_path: Path) -> None:
    rng, job, cut = random.Random(asynchronous), Job(tmp_path / "run"), 0
    for kill in itertools.count():
        assert kill < KILLS + 20, "no kill fell into a save"
        if kill >= KILLS and cut > 0:
            break
        victims = rng.choice([[0], [1], [0, 1]])
        before = job.latest()
        reported = job.run_and_kill(asynchronous, rng.uniform(0.0, 0.08), victims, rng.randint(1, 3))
        cut += any(path.name.endswith(".tmp") for path in job.root.iterdir())
        found = job.latest()
        assert found >= reported > before
        assert found <= reported + 2
