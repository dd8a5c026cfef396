"""What integrations have in common: averages of a model that a trainer makes, which follow its optimizers, and go on
from its checkpoints; what a library's save_pretrained() leaves, with averaged weights, for its from_pretrained(); an
EMA of masters that another's optimizer keeps, which may put them elsewhere."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, NoReturn

import torch.distributed as dist
from torch import nn

from shardow.averaging.persistence import export
from shardow.averaging.tracked import Source
from shardow.base.checks import invalid, one_of, unsupported, warn
from shardow.ema import EMA
from shardow.errors import NotFoundError

#: diffusers' own name.
_DIFFUSION = "diffusion_pytorch_model.safetensors"
#: "error": what has no averages can't be resumed; "from_model": they begin anew there, with a warning.
Missing = Literal["error", "from_model"]


class Keeping:
    """``ema``: from the beginning of training on. ``options``: EMA's, until then."""

    ema: EMA | None = None
    options: dict[str, Any]
    use: Any  # which of several decays
    missing: Missing
    _handles: tuple[Any, ...] = ()

    def keep(self, decay: Any, use: Any, missing: Missing, options: Mapping[str, Any]) -> None:
        self.options, self.use = {"decay": decay, **options}, use
        self.missing = one_of("missing", missing, ("error", "from_model"))

    def follow(self, *optimizers: Any, samples: Any = None) -> None:
        """One update after each step, until let_go()."""
        assert self.ema is not None
        self._handles = tuple(self.ema.attach(one, samples=samples) for one in optimizers)

    def let_go(self) -> None:
        for one in self._handles:
            one.remove()
        self._handles = ()

    def begin_anew(self, lacking: str, instead: str = "") -> None:
        """Raises where that was not asked for. ``lacking``: what the checkpoint has not."""
        if self.missing == "error":
            raise NotFoundError(
                f"{lacking}, so the averages can't go on where this checkpoint was saved. {instead}To begin them from "
                f"its weights: {type(self).__name__}(missing='from_model')"
            )
        warn(f"{lacking}: the averages begin anew from the checkpoint's weights")


def averages_of(model: nn.Module, options: Mapping[str, Any]) -> EMA:
    """On all ranks together, also of a plain model."""
    return EMA(model, **{"group": dist.group.WORLD if dist.is_initialized() else None, **options})


def newest_first(parent: str | Path, prefix: str = "") -> Iterator[tuple[int, Path]]:
    """What is called ``prefix``NUMBER in ``parent``, by that number; without a prefix, what ends in one."""
    found = [(one.name.removeprefix(prefix), one) for one in Path(parent).glob(f"{prefix or '[!.]'}*")]
    digits = [(text if prefix else text[len(text.rstrip("0123456789")) :], one) for text, one in found]
    yield from sorted(((int(text), one) for text, one in digits if text.isdecimal()), reverse=True)


def save_pretrained(
    ema: EMA,
    model: nn.Module,
    folder: str | Path,
    dtype: Any = None,
    *,
    main: bool,
    max_shard_size: int | str | None = None,
    decay: Any = None,
) -> None:
    """The averages of ``model``, which is unwrapped: of transformers or diffusers, with its configuration; of PEFT, the
    averaged adapter in its own dtype; of any other, weights alone. Every rank writes its part of them, by the names and
    in the form of transformers' own save_pretrained(). Collective.

    Args: of EMA.export(), and ``main``: this rank writes all else. A model of diffusers is one file.
    """
    folder, own = Path(folder), getattr(model, "save_pretrained", None)
    if hasattr(model, "peft_config"):
        adapter = ema.full_state_dict(decay, complete=False)  # small
        own(folder, state_dict=adapter) if main and own else None
        return
    diffusion = hasattr(model, "save_config")
    if main and diffusion:
        model.save_config(folder)  # type: ignore[operator]
    elif main and own:
        own(folder, state_dict={})  # first: it removes other weights
        if dtype is not None:
            config = folder / "config.json"
            values = {**json.loads(config.read_text()), "dtype": str(dtype).removeprefix("torch.")}
            config.write_text(json.dumps(values, indent=2) + "\n")
    if diffusion:
        ema.export(folder / _DIFFUSION, dtype, decay=decay)
    else:
        export(ema._averages, folder, dtype, max_shard_size, decay, None, None, pretrained=True)


class MastersEMA(EMA):
    """``masters()``: what ``source=`` takes, as it is now; ``addresses()``: where it lies, cheap enough to be asked
    before every update.
    """

    def __init__(
        self,
        model: nn.Module,
        decay: Any,
        masters: Callable[[], Mapping[str, Source]],
        addresses: Callable[[], list[int]],
        options: Mapping[str, Any],
    ) -> None:
        for name in ("source", "optimizer", "overlap"):
            if options.get(name):
                raise invalid(f"ema(..., {name}=...): masters are averaged after the optimizer's steps; leave it out")
        seen = addresses()
        super().__init__(model, decay, source=masters(), **options)

        def find(follow: Callable[[Mapping[str, Source]], None]) -> None:
            nonlocal seen
            if (moved := addresses()) != seen:
                follow(masters())
                seen = moved

        self._averages.swap.find_sources = find

    def attach(self, optimizer: Any, **_: Any) -> NoReturn:
        raise unsupported("attach(): this optimizer steps another one inside; call update() after its steps")

    def __deepcopy__(self, memo: Any) -> NoReturn:
        raise unsupported(
            "an EMA of an optimizer's masters can't be copied or pickled: save() it, or take its state_dict()"
        )

    def __reduce__(self) -> NoReturn:
        self.__deepcopy__({})
