"""What the command line says."""

from __future__ import annotations

import argparse
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

SHARDINGS = ("fsdp2", "fsdp1", "ddp", "hsdp", "plain")


@dataclass(frozen=True)
class Options:
    ranks: int = 2
    steps: int = 1200
    shard: str = "fsdp2"
    seed: int = 0
    batch: int = 128
    lr: float = 4e-3
    decays: tuple[float, ...] = (0.99, 0.998)
    eval_every: int = 150
    samples: int = 512
    resume_ranks: int = 3
    resume_steps: int = 60
    out: Path = Path("out/demo")
    quick: bool = False
    width: int = 64
    depth: int = 4
    sample_steps: int = 20
    epochs: int = 12

    def as_text(self) -> dict[str, str]:
        """For the report: the flags by their names."""
        shown = {name.replace("_", "-"): value for name, value in asdict(self).items()}
        shown["decays"] = ",".join(map(str, self.decays))
        return {name: str(value) for name, value in shown.items()}


#: What --quick changes, unless a flag says otherwise: the whole path in seconds, with samples that are not worth looking at.
QUICK: dict[str, Any] = {
    "steps": 24,
    "batch": 48,
    "eval_every": 12,
    "samples": 90,
    "resume_steps": 4,
    "width": 32,
    "depth": 2,
    "sample_steps": 6,
    "epochs": 2,
}

_HELP = {
    "ranks": "processes that train together",
    "steps": "optimizer steps before the checkpoint",
    "shard": "how the model is shared among the ranks",
    "seed": "of weights, batches and noise",
    "batch": "images of one step, over all ranks",
    "lr": "learning rate, constant after a short warm-up",
    "decays": "decays that are averaged at once, separated by commas",
    "eval_every": "steps between evaluations",
    "samples": "images sampled per evaluation and set of weights",
    "resume_ranks": "ranks that the checkpoint is resumed on (default: one more than --ranks)",
    "resume_steps": "steps that are trained after the resume",
    "out": "where everything is written",
    "width": "of the transformer",
    "depth": "of the transformer, in blocks",
    "sample_steps": "steps of the sampler",
    "epochs": "of the classifier that judges",
}


def parse(arguments: list[str] | None = None) -> Options:
    """Exits with a message for what makes no sense."""
    parser = argparse.ArgumentParser(
        prog="python -m examples.digits", description="Train a small diffusion model on several ranks and see what its averages do."
    )
    for field in fields(Options):
        if field.name in _HELP:
            _add(parser, field.name, field.default)
    parser.add_argument("--quick", action="store_true", help="the whole path in some 20 seconds, for tests")
    given = {name: value for name, value in vars(parser.parse_args(arguments)).items() if value is not None}
    chosen = {**(QUICK if given["quick"] else {}), **given}
    chosen.setdefault("resume_ranks", chosen.get("ranks", Options.ranks) + 1)
    options = Options(**chosen)
    if problem := _problem(options):
        parser.error(problem)
    return options


def _add(parser: argparse.ArgumentParser, name: str, default: Any) -> None:
    shown = ",".join(map(str, default)) if isinstance(default, tuple) else default
    extra = "" if "default" in _HELP[name] else f" (default {shown})"
    choices = SHARDINGS if name == "shard" else None
    kind = _decays if name == "decays" else type(default) if not isinstance(default, Path) else Path
    parser.add_argument(
        f"--{name.replace('_', '-')}", type=kind, choices=choices, help=_HELP[name] + extra, metavar=None if choices else name.upper()[:8]
    )


def _decays(text: str) -> tuple[float, ...]:
    try:
        return tuple(float(part) for part in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no list of numbers like 0.99,0.998") from None


def _problem(options: Options) -> str | None:
    most = max(options.ranks, options.resume_ranks)
    counts = ("ranks", "steps", "batch", "eval_every", "resume_ranks", "resume_steps", "width", "depth", "sample_steps", "epochs")
    if wrong := [name for name in counts if getattr(options, name) < 1]:
        return f"--{wrong[0].replace('_', '-')} must be at least 1"
    if not options.decays or any(not 0.5 <= d < 1 for d in options.decays) or len(set(options.decays)) < len(options.decays):
        return "--decays are different numbers of at least 0.5 and below 1"
    if len(options.decays) > 4:
        return "--decays: at most 4, more make no readable figures"
    if options.width % 8:
        return "--width must be a multiple of 8"
    if options.samples < max(64, most) or options.batch < most:
        return f"--samples must be at least 64, and --batch at least one image a rank ({most})"
    return None
