"""What coordination costs against the number of ranks: threads of this process with a connection each to one real
store.

So what is seen is the store's part and the protocol's: the operations and bytes of a rank are exact, the seconds are
those of this machine's few processors working for all of them. A rank of its own has a second thread, to which it
leaves its waits; that one is left out here, as processors of its own would do its work.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from benchmarks import scale_report

sys.path.insert(0, str(Path(__file__).parents[1] / "python" / "tests"))
from emulated import Emulated, emulated, on_all

from shardow import _core

TIMEOUT = 600.0
RANKS = (2, 8, 32, 128, 512, 1024, 2048, 4096)
FACTS = ("seconds", "operations", "sent", "received")
TENSORS = 20_000
_BLOCK = [(4096, 4096)] * 4 + [(11008, 4096)] * 2 + [(4096, 11008), (4096,), (4096,)]  # of a transformer


def shapes(tensors: int) -> list[tuple[str, tuple[int, ...]]]:
    return [
        (f"model.layers.{i // len(_BLOCK)}.part{i % len(_BLOCK)}.weight", _BLOCK[i % len(_BLOCK)])
        for i in range(tensors)
    ]


def held(rank: int, size: int, tensors: int) -> list[_core.TensorView]:
    """What FSDP2 gives a rank: rows of everything."""
    regions = {}
    for shape in set(_BLOCK):
        each = -(-shape[0] // size)
        rows = [(min(rank * each, shape[0]), min((rank + 1) * each, shape[0]))]
        regions[shape] = _core.Region.grid(list(shape), [rows, *([(0, n)] for n in shape[1:])])
    return [_core.TensorView(name, "F32", regions[shape], 64) for name, shape in shapes(tensors)]


def words_of(size: int, tensors: int) -> list[bytes]:
    """By rank: the list's digest, which is everybody's, and the regions, which some tensors of each shape have all
    of."""
    digest = 17  # bytes, with a sign before it
    whole = _core.holding_words(held(0, size, tensors))
    words = [whole[:digest] + _core.holding_words(held(rank, size, len(_BLOCK)))[digest:] for rank in range(size)]
    assert words[0] == whole
    return words


def cost(groups: list[Emulated], call: Callable[[Emulated], Any]) -> dict[str, float]:
    """Of one call on all ranks: the worst rank's operations and bytes, and the seconds until all have done."""
    for group in groups:
        group.store.forget()
    answers, seconds = on_all(groups, call)
    failed = [one for one in answers if isinstance(one, BaseException)]
    if failed:
        raise failed[0]
    stores = [group.store for group in groups]
    operations = [sum(store.operations.values()) for store in stores]
    return {
        "seconds": seconds,
        "operations": max(operations),
        "mean_operations": sum(operations) / len(stores),
        "sent": max(store.sent for store in stores),
        "received": sorted(store.received for store in stores)[-2],  # but for the one that sums up
        "received_by_one": max(store.received for store in stores),
    }


def at(size: int, tensors: int) -> dict[str, dict[str, float]]:
    found: dict[str, dict[str, float]] = {}
    with emulated(size, helped=False) as groups:
        on_all(groups, lambda group: _core.agree(group, "warm", TIMEOUT, lambda: None))
        found["agree"] = cost(groups, lambda group: _core.agree(group, "call()", TIMEOUT, lambda: None))
        words = words_of(size, tensors)
        found["plan"] = cost(groups, lambda group: group.decide(words[group.rank], _summed, TIMEOUT))
        found["later plan"] = cost(groups, lambda group: group.decide(b"=" + bytes(16), lambda _: (b"=", ()), TIMEOUT))
    return found


def _summed(everybody: list[bytes]) -> tuple[bytes, tuple[bytes, ...]]:
    return _core.summed_holdings(everybody), ()


def run(sizes: list[int]) -> dict[int, dict[str, dict[str, float]]]:
    found = {}
    for size in sizes:
        found[size] = at(size, TENSORS)
        scale_report.row(f"{size} ranks", found[size])
    return found


def lines(found: dict[int, dict[str, dict[str, float]]]) -> Iterator[str]:
    sizes = [size for size in found if size >= 8]
    for what in next(iter(found.values())):
        for fact in FACTS:
            power = scale_report.exponent([(size, found[size][what][fact]) for size in sizes])
            yield f"{what}: {fact} ~ ranks^{power:.2f}"
