"""Ranks as processes: started, and ended together when one fails."""

from __future__ import annotations

import gc
import multiprocessing
import os
import pickle
import signal
import sys
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint import CheckpointException
from torch.multiprocessing import start_processes


def run(world: int, fn: Callable[..., Any], *args: Any) -> Any:
    """Returns rank 0's result of ``fn(*args)`` in ``world`` fresh processes that share a gloo process group."""
    os.environ["TORCH_CPP_LOG_LEVEL"] = "ERROR"  # in the ranks, too: no chatter of C++ libraries on the terminal
    multiprocessing.get_context("forkserver").set_forkserver_preload(
        ["shardow", "torch.distributed.checkpoint.state_dict", "torch.distributed.fsdp"]
    )
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # outlives every rank
    # Bytes, since torch would share tensors through files that end with their process.
    start_processes(_rank, (world, store.port, pickle.dumps((fn, args))), world, daemon=True, start_method="forkserver")
    return pickle.loads(store.get("result"))


def _rank(rank: int, world: int, port: int, job: bytes) -> None:
    """Nothing distributed may live at the interpreter's exit, or torch sometimes aborts."""
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the launcher's to handle
    warnings.filterwarnings("ignore", module=r"torch\.")  # about gloo, FSDP on a CPU and checkpoints
    torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // world))
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group("gloo", store=dist.PrefixStore("ranks", store), rank=rank, world_size=world)
    fn, args = pickle.loads(job)
    try:
        result = pickle.dumps(fn(*args))
    except CheckpointException as error:  # which is no Exception, so the launcher would not hear of it
        raise RuntimeError(str(error).strip()) from error
    if rank == 0:
        store.set("result", result)
    gc.collect()
    dist.barrier()
    dist.destroy_process_group()
