"""The test's side of machines in miniature (miniature.py): what ranks do, and what becomes of their links and disks
meanwhile.

with Lab(Plan(folder)) as lab:
    answers = lab.run(fn, ...)  # fn(...) on every rank; what it does may `tell()` the test, as where it is, and the
    test cuts a link
"""

from __future__ import annotations

import functools
import os
import shutil
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Any

import namespaces as ns
import pytest
import ranks
from miniature import Plan, build
from weather import end_of_link


@dataclass
class Answer:
    """Of a rank: what fn() returned, or its traceback; ``seconds`` until then; and how long the process took to end,
    None if it did not.
    """

    fine: bool
    value: Any
    seconds: float
    ended: float | None = None


def why_not() -> str:
    """Why there can be no machines here; empty where there can."""
    missing = [tool for tool in ("ip", "tc", "nsenter") if shutil.which(tool) is None]
    if missing:
        return f"no {', '.join(missing)} (Debian: iproute2, util-linux)"
    if os.geteuid() != 0:
        return "only root may make network namespaces"

    def links() -> None:
        ns.call("ip", "link", "add", "tried", "type", "veth", "peer", "name", "peer")
        ns.call("tc", "qdisc", "add", "dev", "tried", "root", "tbf", "rate", "1mbit", "burst", "32kb", "latency", "1s")

    return "" if _can(links) else "namespaces, virtual links or rates are refused (a container without the rights?)"


@functools.cache
def _why_no_disks() -> str:
    def disk() -> None:
        device = os.open("/dev/fuse", os.O_RDWR)
        ns.mount_memory("/mnt")
        ns.mount_fuse("/mnt/tried", device)

    return (
        ""
        if _can(disk)
        else "no program can serve a disk here: /dev/fuse cannot be opened, or mounts of it are refused"
    )


@functools.cache
def _why_no_weather() -> str:
    can = _can(lambda: os.close(end_of_link("tried")))
    return "" if can else "no program can be a link here: /dev/net/tun cannot be opened, or refuses interfaces"


def _can(tried: Callable[[], None]) -> bool:
    """In namespaces of its own, of which nothing is left."""
    child = os.fork()
    if child == 0:
        try:
            ns.leave(ns.NET | ns.HOST | ns.MOUNTS | ns.IPC)
            tried()
        except BaseException:
            os._exit(1)
        os._exit(0)
    return os.waitpid(child, 0)[1] == 0


class Lab:
    """Skips the test, with the reason, where the plan wants what this machine has not."""

    def __init__(self, plan: Plan) -> None:
        if why := (plan.disks and _why_no_disks()) or (plan.weather and _why_no_weather()):
            pytest.skip(str(why))
        self.plan = plan
        plan.shared.mkdir(parents=True, exist_ok=True)
        context: Any = ranks._context
        self._control, theirs = context.Pipe()
        pairs = [context.Pipe() for _ in range(plan.world)]
        self.pipes: list[Connection] = [ours for ours, _ in pairs]
        self._process = context.Process(target=build, args=(plan, theirs, [end for _, end in pairs]), daemon=True)
        ranks._server.start(self._process)
        for end in [theirs, *(end for _, end in pairs)]:
            end.close()
        assert self._hear_lab() == "ready"

    def __enter__(self) -> Lab:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.join()

    def command(self, *words: Any) -> str:
        """("cut", machine): its link is silent; ("mend", machine); ("off", machine): its link is down, and it knows;
        ("weather", weather); ("faults", disk, faults); ("state", rank): a letter of proc(5), "Z" for one whose threads
        alone are left, "gone".
        """
        self._control.send(words)
        return self._hear_lab()

    def _hear_lab(self) -> str:
        assert self._control.poll(60), "the machines do not answer"
        return str(self._control.recv())

    def run(
        self, fn: Callable[..., Any], *args: Any, timeout: float = 60.0, told: Callable[[int, str], None] | None = None,
        last: bool = False, stuck: Collection[int] = (),
    ) -> list[Answer]:  # fmt: skip
        """fn(*args) on every rank. ``told(rank, text)`` is called for each tell(), before that returns. ``last``: the
        processes end afterwards, as interpreters do, and are waited for, but those of ``stuck`` ranks."""
        for pipe in self.pipes:
            pipe.send((fn, args, last))
        answers: list[Answer | None] = [None] * len(self.pipes)
        began, open_pipes = time.monotonic(), {pipe: rank for rank, pipe in enumerate(self.pipes)}
        until = began + timeout
        while open_pipes and time.monotonic() < until:
            for pipe in wait(list(open_pipes), timeout=max(0.0, until - time.monotonic())):
                assert isinstance(pipe, Connection)
                rank = open_pipes[pipe]
                over = self._hear(pipe, rank, began, answers, told)
                answer = answers[rank]
                if over and (not last or rank in stuck or (answer is not None and answer.ended is not None)):
                    del open_pipes[pipe]
        return [one if one is not None else Answer(False, f"no answer after {timeout} s", timeout) for one in answers]

    def _hear(self, pipe: Connection, rank: int, began: float, answers: list[Answer | None], told: Any) -> bool:
        """Whether nothing more comes in this run."""
        known = answers[rank]
        try:
            kind, value = pipe.recv()
        except (EOFError, ConnectionError):
            if known is None:
                answers[rank] = Answer(False, "the process died", time.monotonic() - began, 0.0)
            else:
                known.ended = time.monotonic() - began - known.seconds
            return True
        if kind == "tell":
            if told is not None:
                told(rank, value)
            pipe.send("go on")
            return False
        answers[rank] = Answer(kind == "fine", value, time.monotonic() - began)
        return True

    def all_fine(self, fn: Callable[..., Any], *args: Any, **options: Any) -> list[Any]:
        answers = self.run(fn, *args, **options)
        assert all(one.fine for one in answers), "\n".join(str(one.value) for one in answers)
        return [one.value for one in answers]
