"""What the command line says."""

from __future__ import annotations

import argparse
import sys
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

SHARDINGS = ("fsdp2", "fsdp1", "ddp", "hsdp", "plain")


def _flag(default: Any, about: str, quick: Any = None, spelled: bool = False) -> Any:
    """A field with its flag's help. ``quick``: its value under --quick; ``spelled``: with underscores, as training scripts have it."""
    return field(default=default, metadata={"help": about, "quick": quick, "spelled": spelled})


@dataclass(frozen=True)
class Options:
    ranks: int = _flag(2, "processes that train together")
    steps: int = _flag(1200, "optimizer steps before the checkpoint", quick=24)
    shard: str = _flag("fsdp2", "how the model is shared among the ranks")
    seed: int = _flag(0, "of weights, batches and noise")
    batch: int = _flag(128, "images of one step, over all ranks", quick=48)
    lr: float = _flag(4e-3, "learning rate, constant after a short warm-up")
    decays: tuple[float, ...] = _flag((0.99, 0.998), "decays that are averaged at once, separated by commas")
    eval_every: int = _flag(150, "steps between evaluations", quick=12)
    samples: int = _flag(512, "images sampled per evaluation and set of weights", quick=90)
    resume_ranks: int = _flag(3, "ranks that the checkpoint is resumed on (default: one more than --ranks)")
    resume_steps: int = _flag(60, "steps that are trained after the resume", quick=4)
    out: Path = _flag(Path("out/demo"), "where everything is written")  # noqa: RUF009 (a Path does not change)
    quick: bool = False
    width: int = _flag(64, "of the transformer", quick=32)
    depth: int = _flag(4, "of the transformer, in blocks", quick=2)
    sample_steps: int = _flag(20, "steps of the sampler", quick=6)
    epochs: int = _flag(12, "of the classifier that judges", quick=2)
    use_bf16: bool = _flag(False, "forward passes of training in bfloat16, by memory.apply()", spelled=True)
    use_activation_checkpointing: bool = _flag(
        False, "blocks keep their inputs alone and run again in backward, by memory.apply()", spelled=True
    )
    use_ema: bool = _flag(True, "keep averages; without them the weights alone are judged, saved and resumed", spelled=True)
    ema_device: str = _flag("", "where the averages live (default: with the weights, and nowhere else is built yet)", spelled=True)

    def as_text(self) -> dict[str, str]:
        """For the report: the flags by their names."""
        shown = {flag(name): value for name, value in asdict(self).items()}
        shown["decays"] = ",".join(map(str, self.decays))
        return {name: str(value).lower() if isinstance(value, bool) else str(value) for name, value in shown.items()}

    def switches(self) -> dict[str, Any] | None:
        """Arguments of memory.apply(); None: no switch is on. The model has no attention that could give weights."""
        if not (self.use_bf16 or self.use_activation_checkpointing):
            return None
        return {"bf16": self.use_bf16, "activation_checkpointing": self.use_activation_checkpointing, "attention_weights": True}


_FLAGS = {one.name: one for one in fields(Options) if one.metadata}
#: What --quick changes, unless a flag says otherwise: the whole path in seconds, with samples that are not worth looking at.
QUICK: dict[str, Any] = {name: one.metadata["quick"] for name, one in _FLAGS.items() if one.metadata["quick"]}


def parse(arguments: list[str] | None = None) -> Options:
    """Exits with a message for what makes no sense."""
    parser = argparse.ArgumentParser(
        prog="python -m examples.digits", description="Train a small diffusion model on several ranks and see what its averages do."
    )
    for name in _FLAGS:
        _add(parser, name)
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


def _add(parser: argparse.ArgumentParser, name: str) -> None:
    default, about = _FLAGS[name].default, _FLAGS[name].metadata["help"]
    shown = ",".join(map(str, default)) if isinstance(default, tuple) else default
    extra = "" if "default" in about else f" (default {str(shown).lower()})"
    choices = SHARDINGS if name == "shard" else None
    kinds: dict[type, Any] = {tuple: _decays, bool: boolean}
    kind = kinds.get(type(default), type(default)) if not isinstance(default, Path) else Path
    word = None if choices else "BOOL" if isinstance(default, bool) else name.upper()[:8]
    parser.add_argument(f"--{flag(name)}", type=kind, choices=choices, help=about + extra, metavar=word)


def flag(name: str) -> str:
    """Of a field, without the dashes before it."""
    return name if name in _FLAGS and _FLAGS[name].metadata["spelled"] else name.replace("_", "-")


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
