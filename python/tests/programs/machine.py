"""A rank of a program: every line is done with shardow, beside the oracle, and compared with it bit for bit."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import models
import torch
import torch.distributed as dist
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor, distribute_tensor

import shardow
from programs.other_job import Marks
from programs.same import refused, same
from programs.story import DECAYS, Line, Oracle, Program, Tensors
from programs.two_jobs import TwoJobs

OTHERS = "notes.txt"


class BodyError(Exception):
    """Raised by a block's body; the user's own."""


class Setter(torch.optim.Optimizer):
    """What writes weights, so that updates in the background are waited for. ``write``: what the next step does."""

    def __init__(self, parameters: Iterable[torch.Tensor]) -> None:
        super().__init__(parameters, {})
        self.write: Callable[[], None] = lambda: None

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        write, self.write = self.write, lambda: None
        write()


def run(program: Program, lines: tuple[Line, ...], oracle: Oracle, folder: str, marks: str) -> Oracle:
    """Collective. Returns the oracle as it is after the last line."""
    machine = Machine(program, oracle, Path(folder), 5 if lines and lines[-1][0] == "killed" else 60)
    for number, line in enumerate(lines):
        try:
            machine.marks = Marks(marks, number)
            machine.do(line)
            if number % 2 or not any(
                program.overlap
            ):  # looking at averages ends an update in the background: not after every line
                machine.check()
        except BaseException as error:
            error.add_note(f"at line {number}, {line!r}, on rank {machine.rank}")
            raise
    machine.check()
    machine.finish()
    return machine.oracle


class Machine:
    def __init__(self, program: Program, oracle: Oracle, folder: Path, timeout: float) -> None:
        self.kind, self.overlap, self.oracle, self.folder, self.timeout = (
            program.kind,
            program.overlap,
            oracle,
            folder,
            timeout,
        )
        self.marks: Marks
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.pending: dict[str, Any] = {}
        self.model = models.build(self.kind if self.world > 1 else "plain", self.world)
        self.set_weights(oracle.weights)
        self.optimizer = Setter(self.model.parameters())
        self.emas = [self.average(which) for which in (0, 1)]
        oracle.begin()
        self.handles: list[Any] = [None, None]

    def average(self, which: int) -> shardow.EMA:
        alike = dist.group.WORLD if self.kind == "plain" and self.world > 1 else None
        return shardow.EMA(
            self.model, decay=DECAYS[which], timeout=self.timeout, group=alike, overlap=self.overlap[which]
        )

    def do(self, line: Line) -> None:
        verb, *rest = line
        known = verb != "load" or rest[1] in self.oracle.files
        if known:
            self.wait(*rest)
            getattr(self, "do_" + verb.replace(" ", "_"))(*rest)
        self.oracle.follow(line)

    def wait(self, *rest: Any) -> None:
        """A background save of a path ends before somebody looks at it."""
        for path in [path for path in self.pending if path in rest]:
            self.pending.pop(path).wait()

    # ---- training

    def do_step(self, seed: int) -> None:
        self._train(seed, False)

    def do_nan(self, seed: int) -> None:
        self._train(seed, True)

    def _train(self, seed: int, poisoned: bool) -> None:
        self._move_weights(seed, poisoned)
        for ema, attached, overlap in zip(self.emas, self.oracle.attached, self.overlap, strict=True):
            if not attached and overlap:
                with refused():
                    ema.update()
            if not attached:
                self._update_alone(ema, overlap)

    def _update_alone(self, ema: shardow.EMA, overlap: bool) -> None:
        """Updates an EMA that is attached to no optimizer, as users do."""
        if not overlap:
            ema.update()
            return
        own = Setter(self.model.parameters())
        with ema.attach(own):
            own.step()

    def do_skip(self, seed: int) -> None:
        self._move_weights(seed, False)

    def _move_weights(self, seed: int, poisoned: bool) -> None:
        ahead = Oracle(self.oracle.weights)
        ahead.begin()
        ahead.follow(("nan" if poisoned else "step", seed))
        self.optimizer.write = lambda: self.set_weights(ahead.weights)
        self.optimizer.step()

    def do_attach(self, which: int) -> None:
        if self.oracle.attached[which]:
            self.handles[which].remove()
        else:
            self.handles[which] = self.emas[which].attach(self.optimizer)

    def do_reset(self, which: int) -> None:
        self.emas[which].reset()

    # ---- swaps

    def do_swap(self, which: int, body: str) -> None:
        ema, inside = self.emas[which], self.oracle.averages[which]
        raising = body == "raises everywhere" or (body == "raises on one" and self.rank == self.world - 1)
        try:
            with ema.swapped():
                same(models.whole_weights(self.model), inside, "inside swapped()")
                if body == "moves" and self.kind != "fsdp1":
                    for p in self.model.parameters():
                        p.data = p.data.clone()
                if body == "misused":
                    for call in (
                        ema.update,
                        ema.state_dict,
                        self.emas[1 - which].update,
                        lambda: ema.swapped().__enter__(),
                    ):
                        with refused():
                            call()
                if raising:
                    raise BodyError(f"of rank {self.rank}")
        except BodyError:
            assert raising
        except shardow.Error as error:
            assert body == "raises on one", error
        else:
            assert not raising
        if body == "raises on one" and self.world > 1:
            ema.restore()

    def do_callbacks(self, which: int) -> None:
        self.emas[which].swap_in()
        same(models.whole_weights(self.model), self.oracle.averages[which], "between swap_in() and swap_out()")
        self.emas[which].swap_out()

    # ---- files

    def do_save(self, which: int, path: str) -> None:
        self._leave_something(path)
        self.emas[which].save(self.folder / path)

    def do_async_save(self, which: int, path: str) -> None:
        """The lines that follow run beside it, and change what it has copied."""
        self.pending[path] = self.emas[which].async_save(self.folder / path)

    def do_killed(self, which: int, path: str, rank: int, delay: float, other: Any) -> None:
        """A save in which a rank is killed; the others get an error in time. Whoever survived a save that was done by
        then ends here too. The oracle is left behind."""
        if self.rank == 0:
            torch.save(self.oracle, self.marks.path("oracle"))
        if other:
            self.marks.make("wanted")
            self.marks.wait("ready")
        dist.barrier()
        if self.rank == rank:
            threading.Timer(delay, os.kill, (os.getpid(), signal.SIGKILL)).start()
        with contextlib.suppress(shardow.Error):
            self.emas[which].save(self.folder / path)
        os.kill(os.getpid(), signal.SIGKILL)

    def do_load(self, which: int, path: str) -> None:
        with contextlib.nullcontext() if self.oracle.fits(path) else refused():
            self.emas[which].load(self.folder / path, options="own")

    def do_two_jobs(self, which: int, path: str, mine: tuple[str, ...], other: tuple[str, int, Any]) -> None:
        TwoJobs(self, which, path, other).do(mine)

    def do_open(self, path: str) -> None:
        if self.rank == 0 and path in self.oracle.files:
            with shardow.open(self.folder / path) as opened:
                same({name: opened[name] for name in opened}, self.oracle.files[path][0], f"in {path}")

    def do_elsewhere(self, path: str) -> None:
        """On one rank, without the others: any world size loads it."""
        if self.rank == 0 and path in self.oracle.files:
            averages, steps = self.oracle.files[path]
            alone = shardow.EMA(models.make(seed=3), decay=0.5)
            if not self.oracle.fits(path):
                with refused():
                    alone.load(self.folder / path)
                return
            alone.load(self.folder / path)
            same(alone.full_state_dict(complete=False), averages, f"loaded from {path} by one process")
            assert alone.stats()["step"] == steps

    def do_export(self, which: int) -> None:
        self.emas[which].export(self.folder / "export")
        if self.rank == 0:
            with shardow.open(self.folder / "export") as opened:
                same({name: opened[name] for name in self.oracle.weights}, self.oracle.averages[which], "exported")

    def do_copy_to(self, which: int) -> None:
        other = models.make(seed=5)
        self.emas[which].copy_to(other)
        same({name: p.detach() for name, p in other.named_parameters()}, self.oracle.averages[which], "copied")

    def do_lone_job(self, seed: int) -> None:
        """A process that has nothing to do with the ranks writes beside their files."""
        if self.rank == self.world - 1:
            torch.manual_seed(seed)
            mine = {"lone": torch.randn(5)}
            shardow.save(mine, self.folder / "lone.safetensors")
            with shardow.open(self.folder / "lone.safetensors") as opened:
                same({"lone": opened["lone"]}, mine, "of a lone job")

    def _leave_something(self, path: str) -> None:
        if self.rank == 0 and (self.folder / path).is_dir():
            (self.folder / path / OTHERS).write_text("not shardow's")

    # ---- memory

    def do_move(self) -> None:
        for p in self.model.parameters():
            p.data = p.data.clone()
        self._taken_over()

    def _taken_over(self) -> None:
        """FSDP1 takes over what was put elsewhere when it gathers next. Until then what needs the weights is refused on
        all ranks.
        """
        if isinstance(self.model, FullyShardedDataParallel):
            for call in (self.emas[0].distance, self.emas[1].swap_in):
                with refused():
                    call()
            with FullyShardedDataParallel.summon_full_params(self.model):
                pass

    def do_replace(self) -> None:
        """A parameter that is another object now: refused, and the way out is a new EMA that loads the old one's
        state."""
        layer = next(module for module in self.model.modules() if isinstance(module, torch.nn.Linear))
        layer.weight = torch.nn.Parameter(layer.weight.detach().clone())
        self._taken_over()
        for which, ema in enumerate(self.emas):
            if self.oracle.attached[which]:
                self.handles[which].remove()
            with refused():
                self._update_alone(ema, self.overlap[which])
        states = [ema.state_dict() for ema in self.emas]
        self.optimizer = Setter(self.model.parameters())
        for which, state in enumerate(states):
            self.emas[which] = self.average(which)
            self.emas[which].load_state_dict(state)
            if self.oracle.attached[which]:
                self.handles[which] = self.emas[which].attach(self.optimizer)

    # ---- truth

    def check(self) -> None:
        same(models.whole_weights(self.model), self.oracle.weights, "weights")
        for which, ema in enumerate(self.emas):
            full = ema.full_state_dict(complete=False)
            assert ema.step == self.oracle.steps[which]
            if self.rank == 0:
                same(full, self.oracle.averages[which], f"averages {which}")

    def finish(self) -> None:
        self.wait(*list(self.pending))
        if self.rank == 0:
            for path in self.oracle.files:
                self.do_open(path)
                if (self.folder / path / OTHERS).exists():
                    assert (self.folder / path / OTHERS).read_text() == "not shardow's"
            killed = tuple(f".{path}." for path in self.oracle.killed)
            assert not [one.name for one in self.folder.rglob(".*.tmp") if not one.name.startswith(killed)]

    @torch.no_grad()
    def set_weights(self, weights: Tensors) -> None:
        if isinstance(self.model, FullyShardedDataParallel):
            with FullyShardedDataParallel.summon_full_params(self.model, writeback=True):
                for name, p in self.model.named_parameters():
                    p.copy_(weights[models._clean(name)])
            return
        for name, p in self.model.named_parameters():
            full, here = weights[models._clean(name)], p
            if isinstance(p, DTensor):
                full, here = (
                    distribute_tensor(full, p.device_mesh, p.placements, src_data_rank=None).to_local(),
                    p.to_local(),
                )
            here.copy_(full)
