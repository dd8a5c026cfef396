"""Drop-in surfaces: change an import and keep training.

One module or package for each origin, named after it; what improves and what differs is in docs/migration.md. `_impl`
is how they keep averages and write files: origins -> _impl.

May import: averages, start, merging, files, model, distributed, base, errors, ema, schedules.
"""

from shardow.base.checks import with_torch

__all__ = [
    "automodel", "bagel", "causal_forcing", "diffusers", "dist_ema", "ema_pytorch", "swa_utils", "timm", "torch_ema",
    "twinkle",
]  # fmt: skip


with with_torch("shardow.compat"):
    import torch  # noqa: F401


def __dir__() -> list[str]:
    return __all__
