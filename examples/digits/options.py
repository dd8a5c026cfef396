"""What the command line says."""

from __future__ import annotations

import argparse
import sys
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

SHARDINGS = ("fsdp2", "fsdp1", "ddp", "hsdp", "plain")


def boolean(text: str) -> bool:
    """true, yes, t, y or 1, and their opposites, in any case."""
    if text.lower() not in ("true", "yes", "t", "y", "1", "false", "no", "f", "n", "0"):
        raise argparse.ArgumentTypeError(f"{text!r} is neither true nor false")
    return text.lower() in ("true", "yes", "t", "y", "1")


def _decays(text: str) -> tuple[float, ...]:
    try:
        return tuple(float(part) for part in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no list of numbers like 0.99,0.998") from None


def _flag(default: Any, about: str, quick: Any = None, **argument: Any) -> Any:
    """A field, with its value under --quick and what argparse is told of its flag."""
    kind = {bool: boolean, tuple: _decays}.get(type(default), type(default))
    return field(default=default, metadata={"quick": quick, "argument": {"type": kind, "help": about, **argument}})


@dataclass(frozen=True)
class Options:
    ranks: int = _flag(2, "processes that train together")
    steps: int = _flag(1200, "optimizer steps before the checkpoint", quick=24)
    shard: str = _flag("fsdp2", "how the model is shared among the ranks", choices=SHARDINGS)
    seed: int = _flag(0, "of weights, batches and noise")
    batch: int = _flag(128, "images of one step, over all ranks", quick=48)
    lr: float = _flag(4e-3, "learning rate, constant after a short warm-up")
    decays: tuple[float, ...] = _flag(
        (0.99, 0.998), "decays that are averaged at once, separated by commas", metavar="LIST"
    )
    eval_every: int = _flag(150, "steps between evaluations", quick=12)
    samples: int = _flag(512, "images sampled per evaluation and set of weights", quick=90)
    resume_ranks: int = _flag(
        3, "ranks that the checkpoint is resumed on (one more than --ranks, if that alone is given)"
    )
    resume_steps: int = _flag(60, "steps that are trained after the resume", quick=4)
    out: Path = _flag(Path("out/demo"), "where everything is written")  # noqa: RUF009 (a Path does not change)
    quick: bool = False
    width: int = _flag(64, "of the transformer", quick=32)
    depth: int = _flag(4, "of the transformer, in blocks", quick=2)
    sample_steps: int = _flag(20, "steps of the sampler", quick=6)
    epochs: int = _flag(12, "of the classifier that judges", quick=2)
    use_bf16: bool = _flag(False, "forward passes of training in bfloat16, by memory.apply()", metavar="BOOL")
    use_activation_checkpointing: bool = _flag(
        False, "blocks keep their inputs alone and run again in backward, by memory.apply()", metavar="BOOL"
    )
    use_ema: bool = _flag(
        True, "keep averages; without them the weights alone are judged, saved and resumed", metavar="BOOL"
    )
    ema_device: str = _flag(
        "", "where the averages live (by default with the weights; nowhere else is built yet)", metavar="DEVICE"
    )

    def as_text(self) -> dict[str, str]:
        """For the report: the flags by their names."""
        shown = {
            flag(name): str(value).lower() if isinstance(value, bool) else str(value)
            for name, value in asdict(self).items()
        }
        return {**shown, "decays": ",".join(map(str, self.decays))}

    def switches(self) -> dict[str, Any] | None:
        """Arguments of memory.apply(); None: no switch is on. The model has no attention that could give weights."""
        if not (self.use_bf16 or self.use_activation_checkpointing):
            return None
        return {
            "bf16": self.use_bf16,
            "activation_checkpointing": self.use_activation_checkpointing,
            "attention_weights": True,
        }


_FLAGS = {one.name: one.metadata for one in fields(Options) if one.metadata}
# :What --quick changes, unless a flag says otherwise: the whole path in seconds, with samples that are not worth
# looking at.
QUICK: dict[str, Any] = {name: about["quick"] for name, about in _FLAGS.items() if about["quick"]}


def flag(name: str) -> str:
    """Of a field, without the dashes before it; four have underscores, as training scripts have them."""
    return name if name.startswith(("use_", "ema_")) else name.replace("_", "-")


def parse(arguments: list[str] | None = None) -> Options:
    """Exits with a message for what makes no sense."""
    about = "Train a small diffusion model on several ranks and see what its averages do."
    parser = argparse.ArgumentParser(
        prog="python -m examples.digits", description=about, argument_default=argparse.SUPPRESS
    )
    for name, metadata in _FLAGS.items():
        default = getattr(Options, name)
        shown = ",".join(map(str, default)) if isinstance(default, tuple) else str(default).lower()
        argument = dict(metadata["argument"])
        parser.add_argument(
            f"--{flag(name)}",
            **argument | {"help": f"{argument['help']} (default {shown})" if shown else argument["help"]},
        )
    parser.add_argument("--quick", action="store_true", help="the whole path in some 20 seconds, for tests")
    given = vars(parser.parse_args(arguments))
    chosen = {**(QUICK if "quick" in given else {}), **given}
    chosen.setdefault("resume_ranks", chosen.get("ranks", Options.ranks) + 1)
    if not chosen.get("use_ema", True):
        if idle := [f"--{flag(name)}" for name in ("decays", "ema_device") if given.get(name)]:
            print(f"{' and '.join(idle)}: without effect, since --use_ema is false", file=sys.stderr)
        chosen |= {"decays": (), "ema_device": ""}
    options = Options(**chosen)
    if problem := _problem(options):
        parser.error(problem)
    return options


def _problem(options: Options) -> str | None:
    most, decays = max(options.ranks, options.resume_ranks), options.decays
    counts = (
        "ranks",
        "steps",
        "batch",
        "eval_every",
        "resume_ranks",
        "resume_steps",
        "width",
        "depth",
        "sample_steps",
        "epochs",
    )
    if wrong := [name for name in counts if getattr(options, name) < 1]:
        return f"--{flag(wrong[0])} must be at least 1"
    if (
        options.use_ema != bool(decays)
        or any(not 0.5 <= d < 1 for d in decays)
        or len(set(decays)) < len(decays)
        or len(decays) > 4
    ):
        return "--decays are different numbers of at least 0.5 and below 1, at most 4 of them"
    if options.width % 8:
        return "--width must be a multiple of 8"
    if options.samples < max(64, most) or options.batch < most:
        return f"--samples must be at least 64, and --batch at least one image a rank ({most})"
    return None
