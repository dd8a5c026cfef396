"""Options of the command line."""

from __future__ import annotations

import argparse
import sys
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

SHARDINGS = ("fsdp2", "fsdp1", "ddp", "hsdp", "plain")


def boolean(text: str) -> bool:
    """Reads true, yes, t, y or 1, and their opposites, in any case."""
    if text.lower() not in ("true", "yes", "t", "y", "1", "false", "no", "f", "n", "0"):
        raise argparse.ArgumentTypeError(f"{text!r} is neither true nor false")
    return text.lower() in ("true", "yes", "t", "y", "1")


def _decays(text: str) -> tuple[float, ...]:
    try:
        return tuple(map(float, text.split(",")))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no list of numbers like 0.99,0.995") from None


def _flag(default: Any, about: str, quick: Any = None, **argument: Any) -> Any:
    """A field, with its value under --quick and the arguments of argparse for its flag."""
    kind = {bool: boolean, tuple: _decays}.get(type(default), type(default))
    argument = {"type": kind, "help": f"{about} (default: {default})", **argument}
    return field(default=default, metadata={"quick": quick, "argument": argument})


@dataclass(frozen=True)
class Options:
    ranks: int = _flag(2, "processes that train together")
    steps: int = _flag(900, "optimizer steps before the checkpoint", quick=24)
    shard: str = _flag("fsdp2", "how the model is shared among the ranks", choices=SHARDINGS)
    seed: int = _flag(0, "of weights, batches and noise")
    batch: int = _flag(64, "images of one step, over all ranks", quick=48)
    lr: float = _flag(8e-3, "learning rate, constant after a short warm-up")
    decays: tuple[float, ...] = _flag(
        (0.99, 0.995), "decays that are averaged at once, with commas between", metavar="LIST"
    )
    eval_every: int = _flag(100, "steps between evaluations", quick=12)
    samples: int = _flag(256, "images sampled per evaluation and set of weights", quick=90)
    resume_ranks: int = _flag(3, "ranks of the resume; one more than --ranks, if that alone is given")
    resume_steps: int = _flag(40, "steps that are trained after the resume", quick=4)
    out: Path = _flag(Path("out/demo"), "where everything is written")  # noqa: RUF009 (a Path does not change)
    quick: bool = False
    width: int = _flag(48, "of the transformer", quick=32)
    depth: int = _flag(3, "of the transformer, in blocks", quick=2)
    sample_steps: int = _flag(12, "steps of the sampler", quick=6)
    epochs: int = _flag(8, "of the classifier that judges", quick=2)
    use_bf16: bool = _flag(False, "forward passes of training in bfloat16, by memory.apply()", metavar="BOOL")
    use_activation_checkpointing: bool = _flag(
        False, "blocks keep their inputs alone and run again in backward, by memory.apply()", metavar="BOOL"
    )
    use_ema: bool = _flag(True, "keep averages; else weights alone are judged, saved and resumed", metavar="BOOL")
    ema_device: str = _flag("", "where the averages are; with the weights unless named", metavar="DEVICE")

    def as_text(self) -> dict[str, str]:
        """Flags by their names, for the report."""
        texts = {flag(k): str(v).lower() if isinstance(v, bool) else str(v) for k, v in asdict(self).items()}
        return {**texts, "decays": ",".join(map(str, self.decays))}

    def switches(self) -> dict[str, Any] | None:
        """Arguments of memory.apply(); None: no switch is on. The model has no attention that could give weights."""
        if not (self.use_bf16 or self.use_activation_checkpointing):
            return None
        again = self.use_activation_checkpointing
        return {"bf16": self.use_bf16, "activation_checkpointing": again, "attention_weights": True}


_FLAGS = {option.name: option.metadata for option in fields(Options) if option.metadata}
#: Changed by --quick, unless a flag says otherwise: the whole path in seconds, with samples that show nothing.
QUICK: dict[str, Any] = {name: about["quick"] for name, about in _FLAGS.items() if about["quick"]}


def flag(name: str) -> str:
    """The flag of a field, without its dashes; four have underscores, as training scripts have them."""
    return name if name.startswith(("use_", "ema_")) else name.replace("_", "-")


def parse(arguments: list[str] | None = None) -> Options:
    """Exits with a message for options that make no sense."""
    about = "Train a small diffusion model on several ranks and see what its averages do."
    parser = argparse.ArgumentParser("python -m examples.digits", None, about, argument_default=argparse.SUPPRESS)
    for name, metadata in _FLAGS.items():
        parser.add_argument(f"--{flag(name)}", **metadata["argument"])
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
    for name, value in asdict(options).items():
        # The report merges what six steps left.
        if name != "seed" and type(value) is int and value < (least := 6 if name == "steps" else 1):
            return f"--{flag(name)} must be at least {least}"
    different = len(set(decays)) == len(decays) <= 4 and all(0.5 <= decay < 1 for decay in decays)
    if options.use_ema != bool(decays) or not different:
        return "--decays are different numbers of at least 0.5 and below 1, at most 4 of them"
    if options.width % 8:
        return "--width must be a multiple of 8"
    if options.samples < max(64, most) or options.batch < most:
        return f"--samples must be at least 64, and --batch at least one image a rank ({most})"
    return None
