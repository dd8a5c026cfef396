"""The ``ema`` section of a recipe: which averages it asks for."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

from torch import nn
from torch.distributed.fsdp import FSDPModule

from shardow import errors
from shardow.base.checks import invalid
from shardow.compat.automodel.managed import checked_decay
from shardow.compat.automodel.second_model import ShardedModelEMAManager
from shardow.compat.automodel.shadow import EMAManager

logger = logging.getLogger(__name__)


def build_ema(
    cfg: Any, model: nn.Module, build_ema_model: Callable[[], nn.Module] | None = None, init_mode: str = "auto"
) -> EMAManager | ShardedModelEMAManager | None:
    """The averages that a recipe's ``ema`` section asks for. ``cfg``: that section, a mapping or an object with
    attributes, or None.

    ``decay``: 0.9999 where it is not said; None (YAML's null), or no section: no averages. ``implementation``: "shadow"
    is EMAManager, "sharded_model" is ShardedModelEMAManager, "auto" the second where ``init_mode`` (the recipe's
    ``model.init_mode``) is "hf_backbones" and ``model`` is FSDP2's, else the first. ``build_ema_model``: builds the
    second model like the first one, sharded alike.

    Raises ValueError for other keys (a TypeError too), implementations and values.
    """
    section = _section(cfg)
    unknown = section.keys() - {"decay", "implementation"}
    if unknown:
        raise errors.UnknownOptionError(
            f"ema: unknown option(s) {', '.join(sorted(unknown))}; it has decay and implementation"
        )
    decay, implementation = section.get("decay", 0.9999), section.get("implementation", "auto")
    if cfg is None or decay is None:
        return None
    if implementation not in ("auto", "shadow", "sharded_model"):
        raise invalid(
            f"Unsupported ema.implementation={implementation!r}; expected 'auto', 'sharded_model', or 'shadow'"
        )
    if implementation == "auto":
        sharded = init_mode == "hf_backbones" and any(isinstance(module, FSDPModule) for module in model.modules())
        implementation = "sharded_model" if sharded else "shadow"
    try:
        number = checked_decay(float(decay))
    except TypeError:
        raise invalid(f"ema.decay={decay!r} is not a number") from None
    ema: EMAManager | ShardedModelEMAManager
    if implementation == "shadow":
        ema = EMAManager(model, number)
    elif init_mode != "hf_backbones":
        raise invalid("ema.implementation='sharded_model' requires model.init_mode='hf_backbones'; 'shadow' does not")
    elif build_ema_model is None:
        raise invalid("ema.implementation='sharded_model' needs build_ema_model=; 'shadow' needs none")
    else:
        ema = ShardedModelEMAManager(build_ema_model(), model, number)
    logger.info("EMA enabled with %s implementation, decay=%s, %d params tracked", implementation, decay, len(ema))
    return ema


def _section(cfg: Any) -> dict[str, Any]:
    if cfg is None:
        return {}
    if isinstance(cfg, Mapping):
        return {str(key): value for key, value in cfg.items()}
    if callable(getattr(cfg, "to_dict", None)):
        return dict(cfg.to_dict())
    if hasattr(cfg, "__dict__"):
        return {key: value for key, value in vars(cfg).items() if not key.startswith("_")}
    raise invalid(f"ema is a {type(cfg).__name__}; a section with decay and implementation is needed, or null")
