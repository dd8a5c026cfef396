"""What the command line says."""

from __future__ import annotations

import argparse
import sys
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

SHARDINGS = ("fsdp2", "fsdp1", "ddp", "hsdp", "plain")

#: Named and spelled as in the training scripts that have them.
SWITCHES = ("use_bf16", "use_activation_checkpointing", "use_ema", "ema_device")


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
    use_bf16: bool = False
    use_activation_checkpointing: bool = False
    use_ema: bool = True
    ema_device: str = ""

    def as_text(self) -> dict[str, str]:
        """For the report: the flags by their names."""
        shown = {flag(name): value for name, value in asdict(self).items()}
        shown["decays"] = ",".join(map(str, self.decays))
        return {name: str(value).lower() if isinstance(value, bool) else str(value) for name, value in shown.items()}


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
    "use_bf16": "forward passes of training in bfloat16, by memory.apply()",
    "use_activation_checkpointing": "blocks keep their inputs alone and run again in backward, by memory.apply()",
    "use_ema": "keep averages; without them the weights alone are judged, saved and resumed",
    "ema_device": "where the averages live (default: with the weights, and nowhere else is built yet)",
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
    if not chosen.get("use_ema", True):
        if idle := [f"--{flag(name)}" for name in ("decays", "ema_device") if given.get(name)]:
            print(f"{' and '.join(idle)}: without effect, since --use_ema is false", file=sys.stderr)
        chosen |= {"decays": (), "ema_device": ""}
    options = Options(**chosen)
    if problem := _problem(options):
        parser.error(problem)
    return options


def _add(parser: argparse.ArgumentParser, name: str, default: Any) -> None:
    shown = ",".join(map(str, default)) if isinstance(default, tuple) else default
    extra = "" if "default" in _HELP[name] else f" (default {str(shown).lower()})"
    choices = SHARDINGS if name == "shard" else None
    kinds: dict[type, Any] = {tuple: _decays, bool: boolean}
    kind = kinds.get(type(default), type(default)) if not isinstance(default, Path) else Path
    word = None if choices else "BOOL" if isinstance(default, bool) else name.upper()[:8]
    parser.add_argument(f"--{flag(name)}", type=kind, choices=choices, help=_HELP[name] + extra, metavar=word)


def flag(name: str) -> str:
    """Of a field, without the dashes before it."""
    return name if name in SWITCHES else name.replace("_", "-")


def boolean(text: str) -> bool:
    """true, yes, t, y or 1, and their opposites, in any case."""
    words = {"true": True, "yes": True, "t": True, "y": True, "1": True, "false": False, "no": False, "f": False, "n": False, "0": False}
    if text.lower() not in words:
        raise argparse.ArgumentTypeError(f"{text!r} is neither true nor false")
    return words[text.lower()]


def _decays(text: str) -> tuple[float, ...]:
    try:
        return tuple(float(part) for part in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no list of numbers like 0.99,0.998") from None


def _problem(options: Options) -> str | None:
    most = max(options.ranks, options.resume_ranks)
    counts = ("ranks", "steps", "batch", "eval_every", "resume_ranks", "resume_steps", "width", "depth", "sample_steps", "epochs")
    if wrong := [name for name in counts if getattr(options, name) < 1]:
        return f"--{flag(wrong[0])} must be at least 1"
    if (
        options.use_ema != bool(options.decays)
        or any(not 0.5 <= d < 1 for d in options.decays)
        or len(set(options.decays)) < len(options.decays)
    ):
        return "--decays are different numbers of at least 0.5 and below 1"
    if len(options.decays) > 4:
        return "--decays: at most 4, more make no readable figures"
    if options.width % 8:
        return "--width must be a multiple of 8"
    if options.samples < max(64, most) or options.batch < most:
        return f"--samples must be at least 64, and --batch at least one image a rank ({most})"
    return None
