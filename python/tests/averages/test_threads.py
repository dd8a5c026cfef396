"""Several threads, which are those of torch's OpenMP runtime where it is in the process.

They give the same numbers, also in a forked child, whose OpenMP threads are gone, and from any thread.
"""

from __future__ import annotations

import os
import threading

import torch

import shardow

ELEMENTS = 3 << 20  # enough for several threads


def updated(threads: int, seed: int = 0) -> torch.Tensor:
    weights = torch.nn.ParameterList([torch.nn.Parameter(torch.zeros(ELEMENTS))])
    ema = shardow.EMA(weights, decay=0.9, threads=threads)
    with torch.no_grad():
        weights[0].copy_(torch.randn(ELEMENTS, generator=torch.Generator().manual_seed(seed)))
    ema.update()
    return ema.full_state_dict()["0"]


def test_any_number_of_threads_gives_the_same_numbers() -> None:
    torch.ones(ELEMENTS).mul_(2)  # torch's own threads are there
    wanted = updated(1, seed=1)
    for threads in (2, 3, 7):
        assert torch.equal(updated(threads, seed=1), wanted)


def test_a_forked_child_has_threads_of_its_own() -> None:
    wanted = updated(2)  # the runtime's threads are there, and the child does not have them
    child = os.fork()
    if child == 0:
        try:
            torch.set_num_threads(1)  # torch itself would wait for threads that are gone
            os._exit(0 if torch.equal(updated(2), wanted) else 3)
        except BaseException:
            os._exit(4)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_thread_that_reads_figures_never_stops_training() -> None:
    model = torch.nn.ParameterList([torch.nn.Parameter(torch.zeros(ELEMENTS))])
    ema = shardow.EMA(model, decay=0.9)
    ended, read, failed = threading.Event(), [0], list[Exception]()

    def read_figures() -> None:
        while not ended.is_set():
            try:
                assert ema.stats()["step"] <= ema.step
                read[0] += 1
            except Exception as error:
                failed.append(error)

    readers = [threading.Thread(target=read_figures) for _ in range(2)]
    for reader in readers:
        reader.start()
    try:
        for _ in range(100):
            ema.update()
            with ema.swapped():
                pass
    finally:
        ended.set()
        for reader in readers:
            reader.join()
    assert (ema.step, failed) == (100, [])
    assert read[0] > 0


def test_several_threads_of_the_caller_update_at_once() -> None:
    wanted = [updated(2, seed) for seed in range(3)]
    found: dict[int, torch.Tensor] = {}

    def work(seed: int) -> None:
        for _ in range(5):
            found[seed] = updated(2, seed)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(torch.equal(found[seed], wanted[seed]) for seed in range(3))
