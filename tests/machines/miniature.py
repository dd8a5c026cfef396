"""Machines in miniature: network namespaces at one switch, each with a host name, a /dev/shm, process numbers and a
scratch file system of its own, two real ranks on each, and one folder that all of them see.

The store that ranks meet in lives on machine 0, in a process of its own, as a launcher's does. All of it is a tree of
processes under one that is number 1 of its namespace: killed with it, and nothing is left of links and mounts.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import socket
import sys
import time
import traceback
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import fuse_server
import namespaces as ns
import torch
import torch.distributed as dist
from fuse_server import Faults
from weather import Shared, Weather, carry, end_of_link

_STORE, _PORT = "10.77.0.1", 29500
_pipe: Connection | None = None  # of this rank, to the test


@dataclass(frozen=True)
class Plan:
    """``folder`` is seen by all machines, ``folder``/own is each one's own. ``disks``: FUSE mounts in ``folder``, with
    their faults. ``rate``: of each machine's link, both ways, as tc wants it; ``weather``: links are a program's, which
    loses frames and holds them back."""

    folder: Path
    hosts: tuple[str, ...] = ("north", "south")
    each: int = 2
    rate: str = ""
    disks: dict[str, Faults] = field(default_factory=dict)
    weather: Weather | None = None
    seed: int = 0

    @property
    def world(self) -> int:
        return self.each * len(self.hosts)

    @property
    def shared(self) -> Path:
        return self.folder / "shared"

    @property
    def own(self) -> Path:
        return self.folder / "own"


def tell(text: str) -> None:
    """From a rank to the test; returns when told() has."""
    assert _pipe is not None
    _pipe.send(("tell", text))
    _pipe.recv()


def build(plan: Plan, control: Connection, pipes: list[Connection]) -> None:
    ns.leave(ns.NET | ns.MOUNTS | ns.PIDS)
    pid = ns.forked(lambda: _switch(plan, control, pipes))
    _close([control, *pipes])
    os.waitpid(pid, 0)


def _switch(plan: Plan, control: Connection, pipes: list[Connection]) -> None:
    ns.mount_proc()
    disks = {name: Shared(faults) for name, faults in plan.disks.items()}
    weather = Shared(plan.weather or Weather())
    ns.call("ip", "-batch", "-", told="link set lo up\nlink add switch type bridge\nlink set switch up\n")
    machines: list[int] = []
    links: list[int] = []
    for number in range(len(plan.hosts)):
        ready, theirs = socket.socketpair()
        mine = pipes[number * plan.each : (number + 1) * plan.each]
        rest = [control, *(end for end in pipes if end not in mine)]
        pid = ns.forked(lambda n=number, m=mine, r=rest, s=theirs: _machine(plan, disks, n, m, r, s))  # type: ignore[misc]
        links += socket.recv_fds(ready, 1, 1)[1]
        _link(plan, number, pid)
        ready.send(b"1")
        machines.append(pid)
    _close(pipes)
    if links:
        ns.forked(lambda: carry(links, weather, plan.seed))
    control.send("ready")
    while True:
        what, *about = control.recv()
        answer = "done"
        if what == "weather":
            weather.change(about[0])
        elif what == "state":
            answer = _state(f"rank{about[0]}")
        elif what == "faults":
            disks[about[0]].change(about[1])
        elif what in ("cut", "mend"):
            ns.call("ip", "link", "set", f"port{about[0]}", *(("nomaster",) if what == "cut" else ("master", "switch")))
        elif what == "off":
            ns.call("ip", "link", "set", "eth0", "down", within=machines[about[0]])
        control.send(answer)


def _state(name: str) -> str:
    """Of a process, as proc(5) gives it; "gone" where there is none."""
    for process in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            text = process.read_text()
            if f"({name})" in text:
                return text.rpartition(")")[2].split()[0]
    return "gone"


def _close(ends: list[Connection]) -> None:
    for end in ends:
        end.close()


def _link(plan: Plan, number: int, pid: int) -> None:
    port = f"port{number}"
    if plan.weather is None:
        ns.call(
            "ip",
            "-batch",
            "-",
            told=f"link add {port} type veth peer name eth0 netns {pid}\nlink set {port} master switch up\n",
        )
    here = f"link set lo up\naddr add 10.77.0.{number + 1}/24 dev eth0\nlink set eth0 up\n"
    ns.call("ip", "-batch", "-", within=pid, told=here)
    if plan.rate:
        bucket = ("root", "tbf", "rate", plan.rate, "burst", "64kb", "latency", "500ms")
        ns.call("tc", "qdisc", "add", "dev", port, *bucket)
        ns.call("tc", "qdisc", "add", "dev", "eth0", *bucket, within=pid)


def _machine(plan: Plan, disks: Any, number: int, mine: list[Connection], rest: list[Connection], lab: Any) -> None:
    _close(rest)
    ns.leave(ns.NET | ns.HOST | ns.MOUNTS | ns.IPC | ns.PIDS)
    socket.sethostname(plan.hosts[number])
    socket.send_fds(lab, [b"1"], [] if plan.weather is None else [end_of_link("eth0")])
    lab.recv(1)
    pid = ns.forked(lambda: _host(plan, disks, number, mine))
    _close(mine)
    os.waitpid(pid, 0)


def _host(plan: Plan, disks: dict[str, Shared[Faults]], number: int, mine: list[Connection]) -> None:
    """Number 1 of its machine."""
    ns.mount_proc()
    ns.mount_memory("/dev/shm")
    ns.mount_memory(str(plan.own))
    names = plan.own / "hosts"
    names.write_text(
        "127.0.0.1 localhost\n" + "".join(f"10.77.0.{i + 1} {name}\n" for i, name in enumerate(plan.hosts))
    )
    ns.mount_over(str(names), "/etc/hosts")
    for disk, faults in disks.items():
        fuse_server.mount(plan.folder / disk, plan.folder / f"{disk}.files", faults, lambda: _close(mine))
    if number == 0:
        ns.forked(lambda: _keep_store(mine))
    for i, pipe in enumerate(mine):
        others = [end for end in mine if end is not pipe]
        ns.forked(lambda r=number * plan.each + i, p=pipe, o=others: _rank(plan, r, p, o))  # type: ignore[misc]
    _close(mine)
    while True:
        try:
            os.wait()
        except ChildProcessError:
            time.sleep(3600)


def _keep_store(ends: list[Connection]) -> None:
    _close(ends)
    listener = socket.create_server(("", _PORT))
    uv = torch.__version__ >= (2, 7)  # before, libuv's store took no listener
    store = dist.TCPStore(
        "127.0.0.1", _PORT, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach(), use_libuv=uv
    )
    time.sleep(3600)
    del store


def _rank(plan: Plan, rank: int, pipe: Connection, others: list[Connection]) -> None:
    global _pipe
    _close(others)
    Path("/proc/self/comm").write_text(f"rank{rank}")
    _pipe = pipe
    os.environ.update(GLOO_SOCKET_IFNAME="eth0", OMP_NUM_THREADS="2", TORCH_CPP_LOG_LEVEL="ERROR")
    torch.set_num_threads(1)
    gc.freeze()  # what is imported by now; an end of the interpreter would look through it for seconds
    joined = False
    while True:
        try:
            fn, args, last = pipe.recv()
        except EOFError:
            return
        try:
            if not joined:
                dist.init_process_group("gloo", store=_store(plan), rank=rank, world_size=plan.world)
                joined = True
            answer = ("fine", fn(*args))
        except BaseException:
            answer = ("failed", traceback.format_exc())
        pipe.send(answer)
        if last:
            sys.stderr.flush()
            ctypes.pythonapi.Py_Exit(0)


def _store(plan: Plan) -> Any:
    until = time.monotonic() + 20
    while True:
        try:
            return dist.TCPStore(_STORE, _PORT, is_master=False, wait_for_workers=False)
        except dist.DistNetworkError:
            if time.monotonic() > until:
                raise
            time.sleep(0.05)
