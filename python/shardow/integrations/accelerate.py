"""Averages beside accelerate: kept in its save_state() and load_state(), by every rank, whatever the model is sharded
by.

    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    ema = average(accelerator, model, optimizer, 0.999)
    ...
    save_state(accelerator, "run/step-000100")   # whole, or not there
    accelerator.load_state(last_state("run"))

``register_for_checkpointing(ema)`` would keep one rank's part.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from torch import nn

from shardow.base.checks import invalid
from shardow.ema import EMA
from shardow.errors import NotFoundError
from shardow.integrations.common import averages_of, newest_first, save_pretrained

__all__ = ["average", "last_state", "save_averages", "save_state"]


def average(
    accelerator: Accelerator,
    model: nn.Module,
    optimizer: Any,
    decay: Any = 0.9999,
    *,
    name: str = "averages",
    samples: Any = None,
    **options: Any,
) -> EMA:
    """Averages of a prepared model, updated after each step of its prepared optimizer. Collective.

    Steps that only accumulate gradients, or that a GradScaler skips, are not counted. ``accelerator.save_state()`` and
    ``load_state()`` keep the averages from now on. A state without them can't be loaded any more: to go on from one,
    load it first, and call this then, so that they begin with its weights.

    Args:
        name: of the file in each state; another one for each model.
        samples: of EMA.attach(). decay, options: of EMA.

    Raises:
        ValueError: the model was not prepared, or ``name`` is taken.
    """
    if not any(accelerator.unwrap_model(model) is accelerator.unwrap_model(one) for one in accelerator._models):
        raise invalid(
            "average() takes what accelerator.prepare() returned: the model, then its averages, so that they are "
            "sharded as it is"
        )
    taken: set[str] = accelerator.__dict__.setdefault("_shardow_names", set())
    if name in taken:
        raise invalid(f"name={name!r} is taken by another model's averages; give each its own name=")
    ema = averages_of(model, {"decay": decay, **options})
    ema.attach(optimizer, samples=samples)

    def save(models: list[nn.Module], weights: list[Any], folder: str) -> None:
        ema.save(Path(folder, f"{name}.safetensors"))

    def load(models: list[nn.Module], folder: str) -> None:
        try:
            ema.load(Path(folder, f"{name}.safetensors"))
        except NotFoundError as error:
            raise NotFoundError(
                f"{folder} has no {name}.safetensors: it was saved without these averages. To begin them from its "
                "weights, call load_state() before average()"
            ) from error

    accelerator.register_save_state_pre_hook(save)
    accelerator.register_load_state_pre_hook(load)
    taken.add(name)
    return ema


def save_state(accelerator: Accelerator, folder: str | Path) -> None:
    """``accelerator.save_state()`` that is whole under ``folder``, a new name, or not there. Collective.

    accelerate writes a state's parts one after another, and what was killed meanwhile looks like another state.
    """
    folder = Path(folder)
    draft = folder.with_name(f".{folder.name}.saving")
    if accelerator.project_configuration.automatic_checkpoint_naming:
        raise invalid("save_state() names its files; leave out ProjectConfiguration(automatic_checkpoint_naming=True)")
    if folder.exists():
        raise invalid(f"{folder} exists; give every state a name of its own")
    if accelerator.is_main_process:
        shutil.rmtree(draft, ignore_errors=True)
    accelerator.wait_for_everyone()
    accelerator.save_state(str(draft))
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        draft.rename(folder)
    accelerator.wait_for_everyone()


def last_state(parent: str | Path) -> str | None:
    """The newest of what save_state() left in ``parent``, by the number at the end of its name; None where there is
    none.
    """
    return next((str(path) for _, path in newest_first(parent)), None)


def save_averages(
    accelerator: Accelerator,
    ema: EMA,
    model: nn.Module,
    folder: str | Path,
    dtype: Any = None,
    *,
    max_shard_size: int | str | None = None,
    decay: Any = None,
) -> None:
    """The averaged model as save_pretrained() leaves it, for from_pretrained() of transformers, diffusers or PEFT.
    Collective.

    Args: of EMA.export().
    """
    unwrapped = accelerator.unwrap_model(model, keep_torch_compile=False)
    save_pretrained(
        ema, unwrapped, folder, dtype, main=accelerator.is_main_process, max_shard_size=max_shard_size, decay=decay
    )
