"""What follows on paper for more ranks and tensors than any machine here has: which part breaks first, and at what
size.

Bytes and operations are what benchmarks.scale counts; they follow from the protocol and are the same everywhere. The
store's pace is that of one TCPStore on one processor of a small virtual machine.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

STORE = 73_000  # small operations a second, of one store
OPERATIONS = 3.1  # of a rank and round
ROUNDS = {"agree()": 1, "a later save": 14, "a load": 12}
WORDS = 119  # bytes that each rank has to tell in a first plan, of regions that are cut alike
LIST = 60  # bytes of a tensor in a list of tensors, before compression
CRC = 8  # bytes of a tensor in a sum over ranks
HEADER, HEADER_LIMIT = 170, 100_000_000  # bytes of a tensor with its checksum; what readers take
LAYOUT = 1.3e-6  # seconds of a tensor, in a first plan on each rank


@dataclass(frozen=True)
class Case:
    ranks: int
    tensors: int
    parameters: float

    @property
    def title(self) -> str:
        return f"{self.ranks} ranks, {self.tensors} tensors, {self.parameters / 1e12:g} T parameters"


CASES = [
    Case(1_024, 2_000, 0.1e12),
    Case(4_096, 20_000, 1e12),
    Case(16_384, 200_000, 10e12),
    Case(16_384, 1_000_000, 10e12),
]


def costs(case: Case) -> dict[str, float]:
    """Seconds of the part that is slowest for all, by what is asked for."""
    found = {what: rounds * case.ranks * OPERATIONS / STORE for what, rounds in ROUNDS.items()}
    found["one rank reads a first plan's words (bytes)"] = case.ranks * WORDS
    found["each rank's own layout, in a first plan"] = case.tensors * LAYOUT
    found["checksums of a save through the store (bytes)"] = case.ranks * case.tensors * CRC
    found["header of one file (bytes)"] = case.tensors * HEADER
    found["averages of a rank (bytes)"] = 4 * case.parameters / case.ranks
    return found


def lines() -> Iterator[str]:
    for case in CASES:
        yield case.title
        for what, value in costs(case).items():
            yield f"  {what}: {value:,.0f}" if "bytes" in what else f"  {what}: {value:.2f} s"
        if case.tensors * HEADER > HEADER_LIMIT:
            yield f"  one file holds {HEADER_LIMIT // HEADER:,} tensors at most: max_shard_size= divides them"
    limit = next(ranks for ranks in range(1_000, 10**7, 1_000) if ranks * OPERATIONS / STORE > 2)
    yield f"agree() takes 2 s at {limit:,} ranks on such a store"
