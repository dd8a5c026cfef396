"""Random programs over the public verbs, and what must be true at each of their lines: a plain oracle of full tensors
that knows neither ranks nor files."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

Tensors = dict[str, torch.Tensor]
Line = tuple[Any, ...]  # (verb, arguments)
Kept = tuple[Tensors, int]  # what a file holds: averages, number of steps

KINDS = ("plain", "ddp", "fsdp2", "fsdp1")
PATHS = ("one.safetensors", "two", "three.safetensors")  # a directory among them
BODIES = ("fine", "fine", "moves", "raises everywhere", "raises on one", "misused")
DECAYS = (0.9, 0.63)
OVERLAP = ((False, False), (True, False), (True, True))
DELAYS = (0.0, 0.002, 0.005, 0.01, 0.03)  # seconds after which a rank is killed


@dataclass(frozen=True)
class Program:
    """``parts``: each runs on its own number of ranks, with a new model and new EMAs, and begins with what a file has
    kept.

    A part that ends in a line "killed" ends so. ``overlap``: which of the EMAs average in the background.
    """

    kind: str
    overlap: tuple[bool, bool]
    parts: tuple[tuple[int, tuple[Line, ...]], ...]

    def __str__(self) -> str:
        lines = [f"Program({self.kind!r}, {self.overlap!r}, ("]
        for world, part in self.parts:
            lines += [f"    ({world}, ("] + [f"        {line!r}," for line in part] + ["    )),"]
        return "\n".join([*lines, "))"])


def draw(seed: int) -> Program:
    rng = random.Random(seed)
    kind = rng.choice(KINDS)
    first = [("save", rng.randrange(2), PATHS[0]), *(_line(rng) for _ in range(rng.randint(5, 12)))]
    second = [("load", 0, PATHS[0]), *(_line(rng) for _ in range(rng.randint(2, 5)))]
    if seed % 10 == 9:
        other = rng.choice((None, ("same", rng.randrange(1 << 16), None)))
        first.append(("killed", rng.randrange(2), rng.choice(PATHS), rng.randrange(2), rng.choice(DELAYS), other))
    if seed % 3 == 1:
        first.insert(rng.randrange(1, len(first)), _two_jobs(rng, dies=seed % 10 == 4))
    parts = ((2, (("save", 0, PATHS[0]), *first)), (rng.choice((1, 2, 3)), tuple(second)))
    return Program(kind, rng.choice(OVERLAP), parts)


def _two_jobs(rng: random.Random, dies: bool) -> Line:
    """What this job does on the path meanwhile; and the other one: its names, its seed, and which of its ranks dies
    when.
    """
    death = (rng.randrange(2), rng.choice(DELAYS)) if dies else None
    mine = tuple(rng.choice(("save", "save", "load", "read")) for _ in range(rng.randint(1, 5)))
    return (
        "two jobs",
        rng.randrange(2),
        rng.choice(PATHS),
        mine,
        (rng.choice(("same", "same", "other")), rng.randrange(1 << 16), death),
    )


def _line(rng: random.Random) -> Line:
    which, path = rng.randrange(2), rng.choice(PATHS)
    lines: list[Line] = [
        ("step", rng.randrange(1 << 16)),
        ("step", rng.randrange(1 << 16)),
        ("skip", rng.randrange(1 << 16)),
        ("nan", rng.randrange(1 << 16)),
        ("attach", which),
        ("swap", which, rng.choice(BODIES)),
        ("swap", which, rng.choice(BODIES)),
        ("callbacks", which),
        ("save", which, path),
        ("async_save", which, path),
        ("load", which, path),
        ("open", path),
        ("elsewhere", path),
        ("export", which),
        ("copy_to", which),
        ("reset", which),
        ("lone job", rng.randrange(1 << 16)),
        ("move",),
        ("replace",),
    ]
    return rng.choice(lines)


def weights_at(seed: int, like: Mapping[str, torch.Tensor]) -> Tensors:
    """Any rank can work out the same ones."""
    made = {}
    for name, tensor in like.items():
        own = int.from_bytes(hashlib.sha256(f"{seed}/{name}".encode()).digest()[:8], "little") >> 1
        made[name] = torch.randn(tensor.shape, generator=torch.Generator().manual_seed(own)).to(tensor.dtype)
    return made


@dataclass
class Oracle:
    """What the model, both EMAs and every file hold.

    ``files[path]``: (the averages, or None of a file that nobody has written, the number of steps).
    """

    weights: Tensors
    averages: list[Tensors] = field(default_factory=list)
    steps: list[int] = field(default_factory=lambda: [0, 0])
    files: dict[str, Kept] = field(default_factory=dict)
    attached: list[bool] = field(default_factory=lambda: [False, False])
    killed: set[str] = field(default_factory=set)  # paths whose last save was: its leftovers stay until the next one

    def begin(self) -> None:
        """A new model with the weights as they are, and new EMAs."""
        self.averages = [_copy(self.weights), _copy(self.weights)]
        self.steps, self.attached = [0, 0], [False, False]

    def update(self, which: int) -> None:
        """e <- lerp(e, p, 1 - d), held where p is not finite."""
        self.steps[which] += 1
        for name, p in self.weights.items():
            e = self.averages[which][name]
            self.averages[which][name] = torch.where(p.isfinite(), torch.lerp(e, p, 1 - DECAYS[which]), e)

    def fits(self, path: str) -> bool:
        """The file is of a model with these names."""
        return path in self.files and self.files[path][0].keys() == self.weights.keys()

    def loaded(self, which: int, kept: Kept) -> None:
        self.averages[which], self.steps[which] = _copy(kept[0]), kept[1]

    def saved(self, which: int) -> Kept:
        return _copy(self.averages[which]), self.steps[which]

    def follow(self, line: Line) -> None:
        verb, *rest = line
        if verb in ("step", "nan"):
            self.weights = weights_at(rest[0], self.weights)
            if verb == "nan":
                list(self.weights.values())[-1].view(-1)[-1] = float("nan")
            for which in (0, 1):
                self.update(which)
        elif verb == "skip":
            self.weights = weights_at(rest[0], self.weights)
            for which in (0, 1):
                if self.attached[which]:
                    self.update(which)
        elif verb == "attach":
            self.attached[rest[0]] = not self.attached[rest[0]]
        elif verb in ("save", "async_save", "killed"):
            self.files[rest[1]] = self.saved(rest[0])
            (self.killed.add if verb == "killed" else self.killed.discard)(rest[1])
        elif verb == "load" and self.fits(rest[1]):
            self.loaded(rest[0], self.files[rest[1]])
        elif verb == "reset":
            self.averages[rest[0]], self.steps[rest[0]] = _copy(self.weights), 0


def _copy(tensors: Tensors) -> Tensors:
    return {name: tensor.clone() for name, tensor in tensors.items()}
