"""Ranks as processes: started here, watched here, and ended here, whatever happens."""

from __future__ import annotations

import gc
import multiprocessing
import os
import pickle
import signal
import time
import traceback
import warnings
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from typing import Any

GRACE = 20.0  # seconds


class RankError(RuntimeError):
    """A rank failed: its message, and its traceback."""


def run(world: int, fn: Callable[..., Any], *args: Any) -> Any:
    """``fn(*args)`` in ``world`` fresh processes that share a gloo process group: rank 0's result. The first that fails
    ends all.
    """
    import torch.distributed as dist

    os.environ["TORCH_CPP_LOG_LEVEL"] = "ERROR"  # of the ranks, too: no chatter of C++ libraries on the terminal
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(
        ["shardow", "torch.distributed.checkpoint.state_dict", "torch.distributed.fsdp"]
    )  # for all ranks
    store = dist.TCPStore(
        "127.0.0.1", 0, is_master=True, wait_for_workers=False
    )  # the launcher's, so that it outlives every rank
    job = pickle.dumps(
        (fn, args)
    )  # in plain bytes: torch would share tensors through files that end with their process
    pipes: dict[Any, int] = {}
    processes = []
    results: dict[int, Any] = {}
    try:
        for rank in range(world):
            ours, theirs = context.Pipe(duplex=False)
            pipes[ours] = rank
            processes.append(context.Process(target=_rank, args=(theirs, rank, world, store.port, job), daemon=True))
            processes[-1].start()
            theirs.close()
        while len(results) < world:
            for pipe in wait([one for one, rank in pipes.items() if rank not in results]):
                results[pipes[pipe]] = _answer(pipe, pipes[pipe])  # type: ignore[arg-type, index]
        for process in processes:
            process.join(GRACE)
    finally:
        for process in processes:
            process.kill()
    return results[0]


def _answer(pipe: Connection, rank: int) -> Any:
    try:
        error, result = pickle.loads(pipe.recv_bytes())
    except EOFError:
        raise RankError(f"rank {rank} died without a word (out of memory?)", "") from None
    if error:
        raise RankError(f"rank {rank}: {error}", result)
    return result


def _rank(pipe: Connection, rank: int, world: int, port: int, job: bytes) -> None:
    """One rank's life. Ctrl-C is the launcher's to handle. Nothing distributed may live at interpreter exit, or torch
    sometimes aborts.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        import torch
        import torch.distributed as dist

        warnings.filterwarnings(
            "ignore", module=r"torch\."
        )  # its notes to itself about gloo, FSDP on a CPU and checkpoints
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // world))
        store = dist.TCPStore("127.0.0.1", port, is_master=False)
        dist.init_process_group("gloo", store=dist.PrefixStore("ranks", store), rank=rank, world_size=world)
        fn, args = pickle.loads(job)
        result = fn(*args)
        answer = pickle.dumps(("", result if rank == 0 else None))
        del result
        gc.collect()
        dist.barrier()
        dist.destroy_process_group()
    except BaseException as error:
        pipe.send_bytes(pickle.dumps((f"{type(error).__name__}: {error}", traceback.format_exc())))
        time.sleep(GRACE)  # the launcher ends all ranks at once, before the others tell their own view of it
    else:
        pipe.send_bytes(answer)
