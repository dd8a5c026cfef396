"""Tensors that rank 0 alone holds, into everybody's shards: each rank is sent its own elements and nothing else.

Numbered, as the code below:

1. every rank has told rank 0 what it wants: keys, regions, dtypes
2. both sides cut that into the same messages of at most 4 MiB, small pieces packed together (src/tensor/messages.h);
   few are on the way at any time
3. rank 0 sends them in turns; where the source's elements lie one after another they are sent from where they are
4. who fails reads nothing more, and keeps step to the end, so that nobody waits for it; a peer that is lost is passed
   over. Then it raises its first failure; whoever calls this agrees afterwards
5. a peer is lost when it has been silent for the timeout. It counts for all peers and messages at once, from their last
   sign or from when a message was sent to them: several that stand still cost one timeout
"""

from __future__ import annotations

import contextlib
import itertools
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from shardow import _core
from shardow.base.progress import Progress
from shardow.distributed.gather import LocalShard, extract_region, stretch
from shardow.distributed.rank_group import RankGroup
from shardow.distributed.transfers import begun, finish

_MESSAGE = 4 << 20  # bytes
_ON_THE_WAY = 8
_A_LOOK = 0.05  # seconds, to see whether a transfer has ended


@dataclass(frozen=True)
class Want:
    """Of one tensor of the source; ``dtype`` is what travels: the narrower of the source's and the rank's."""

    key: str
    region: bytes
    dtype: torch.dtype


@dataclass(frozen=True)
class Fill:
    """What a rank holds of a tensor, and what it wants for it."""

    part: LocalShard
    want: Want


Tensors = Mapping[str, torch.Tensor]
Message = list[_core.MessagePiece]


def messages(wants: Sequence[Want]) -> Iterator[Message]:
    return _core.Messages(
        len(wants), lambda i: (_core.Region.decode(wants[i].region), wants[i].dtype.itemsize), _MESSAGE
    )


def behind(timeout: float) -> float:
    """Seconds that rank 0 may need to go on when it has lost a peer: for them others wait beyond the timeout."""
    return min(0.25 * timeout, 2.0)


class _Side:
    """One rank's end. ``tag`` keeps what a failed stream has left on the way apart from the next one."""

    def __init__(self, ranks: RankGroup, device: torch.device, tag: int) -> None:
        self._ranks, self._device, self._tag = ranks, device, tag
        self.failed: Exception | None = None

    def end(self) -> None:
        if self.failed is not None:
            raise self.failed

    @contextlib.contextmanager
    def keeping_step(self) -> Iterator[None]:
        """The first failure is noted; others are waiting for what comes after it."""
        try:
            yield
        except Exception as error:
            self.failed = self.failed or error

    def send(self, data: torch.Tensor, rank: int) -> dist.Work | None:
        return self._move(dist.isend, data, rank, group_dst=rank)

    def receive(self, data: torch.Tensor, rank: int) -> dist.Work | None:
        return self._move(dist.irecv, data, rank, group_src=rank)

    def _move(self, how: Callable[..., Any], data: torch.Tensor, rank: int, **peer: int) -> dist.Work | None:
        group = self._ranks.process_group
        return begun(lambda: how(data, group=group, tag=self._tag, **peer), self._otherwise(rank))

    def finish(self, work: dist.Work | None, rank: int, since: float | None = None) -> None:
        """``since``: when the wait began; None: now."""
        gone = 0.0 if since is None else time.monotonic() - since
        finish(work, max(self._ranks.timeout - gone, _A_LOOK), self._otherwise(rank), self._ranks.timeout)

    def _otherwise(self, rank: int) -> str:
        return f"weights between rank {self._ranks.rank} and rank {rank} did not arrive"


class _Recent:
    """The source's tensors, detached. A lazy mapping reads one each time it is asked: the last ones stay, up to 64 MiB
    of them or one.
    """

    _MOST = 64 << 20

    def __init__(self, source: Tensors) -> None:
        self._source = source
        self._kept: OrderedDict[str, torch.Tensor] = OrderedDict()
        self._bytes = 0

    def __getitem__(self, key: str) -> torch.Tensor:
        if key in self._kept:
            self._kept.move_to_end(key)
            return self._kept[key]
        found = self._source[key].detach()
        self._kept[key] = found
        self._bytes += found.nbytes
        while len(self._kept) > 1 and self._bytes > self._MOST:
            self._bytes -= self._kept.popitem(last=False)[1].nbytes
        return found


class Server(_Side):
    """Rank 0."""

    def run(self, source: Tensors, own: Sequence[Fill], wants: list[list[Want]], progress: Progress | None) -> None:
        """Fills ``own``, and sends the others what they want. ``wants``: by rank."""
        self._lost: set[int] = set()
        self._heard = [time.monotonic()] * self._ranks.size  # the last sign of each rank
        self._sent: deque[tuple[dist.Work | None, int, torch.Tensor, float]] = deque()
        total = sum(_core.Region.decode(want.region).size * want.dtype.itemsize for one in wants for want in one)
        done, recent = 0, _Recent(source)
        for turn in itertools.zip_longest(*(messages(one) for one in wants)):
            for rank, message in enumerate(turn):
                if message is None or rank in self._lost:
                    continue
                with self.keeping_step():
                    if rank:
                        self._send_message(recent, message, wants[rank], rank)
                    elif self.failed is None:
                        for piece in message:
                            extract_region(recent[own[piece.want].want.key], piece.region, _target(piece, own))
                    done += sum(piece.bytes for piece in message)
                    if progress is not None and self.failed is None:
                        progress(done, total)
        self._until(0)
        self.end()

    def _send_message(self, source: _Recent, message: Message, wants: Sequence[Want], rank: int) -> None:
        data = torch.empty(0, device="cpu")
        if self.failed is None:
            with self.keeping_step():
                data = _filled(source, message, wants).to(self._device)
        if not data.numel():  # the rank waits for it all the same
            data = torch.zeros(_length(message), dtype=torch.uint8, device=self._device)
        with self._losing(rank):
            self._sent.append((self.send(data, rank), rank, data, time.monotonic()))
        self._until(_ON_THE_WAY)

    def _until(self, most: int) -> None:
        while len(self._sent) > most:
            work, rank, _, sent = self._sent.popleft()
            if rank in self._lost:
                continue
            with self._losing(rank):
                self.finish(work, rank, max(sent, self._heard[rank]))
                self._heard[rank] = time.monotonic()

    @contextlib.contextmanager
    def _losing(self, rank: int) -> Iterator[None]:
        """Passes a rank over from its first failure on."""
        with self.keeping_step():
            try:
                yield
            except Exception:
                self._lost.add(rank)
                raise


class Client(_Side):
    """Every other rank."""

    def run(self, own: Sequence[Fill]) -> None:
        """Fills ``own`` as it comes."""
        self._coming: deque[tuple[dist.Work | None, torch.Tensor, Message]] = deque()
        for message in messages([fill.want for fill in own]):
            direct = _in_place(message, own, self._device)
            data = torch.empty(_length(message), dtype=torch.uint8, device=self._device) if direct is None else direct
            self._coming.append((self.receive(data, 0), data, message if direct is None else []))
            self._until(_ON_THE_WAY, own)
        self._until(0, own)
        self.end()

    def _until(self, most: int, own: Sequence[Fill]) -> None:
        while len(self._coming) > most:
            work, data, packed = self._coming.popleft()
            self.finish(work, 0, time.monotonic() + behind(self._ranks.timeout))
            with self.keeping_step():
                for piece in packed:
                    _target(piece, own).copy_(_inside(data, piece, own[piece.want].want.dtype))


def _filled(source: _Recent, message: Message, wants: Sequence[Want]) -> torch.Tensor:
    """A message's bytes: a view of the source's where they lie there as they travel."""
    first = wants[message[0].want]
    there = stretch(source[first.key], message[0].region) if len(message) == 1 else None
    if there is not None and there.dtype == first.dtype:
        return there.view(torch.uint8)
    packed = torch.empty(_length(message), dtype=torch.uint8, device="cpu")
    for piece in message:
        want = wants[piece.want]
        extract_region(source[want.key], piece.region, _inside(packed, piece, want.dtype))
    return packed


def _in_place(message: Message, own: Sequence[Fill], device: torch.device) -> torch.Tensor | None:
    """Where a message of one piece can be received as it is."""
    fill = own[message[0].want]
    flat = fill.part.flat
    one = len(message) == 1 and flat.dtype == fill.want.dtype and flat.device == device
    return _target(message[0], own).view(torch.uint8) if one else None


def _target(piece: _core.MessagePiece, own: Sequence[Fill]) -> torch.Tensor:
    return own[piece.want].part.flat[piece.begin : piece.begin + piece.region.size]


def _length(message: Message) -> int:
    return message[-1].at + message[-1].bytes


def _inside(packed: torch.Tensor, piece: _core.MessagePiece, dtype: torch.dtype) -> torch.Tensor:
    return packed[piece.at : piece.at + piece.bytes].view(dtype)
