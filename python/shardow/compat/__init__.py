"""Drop-in compat classes: change an import and keep training.

One module for each upstream, named after it; docs/migration.md says what improves and what differs. `_impl` keeps
averages and writes files for them.

May import: averaging, start, merging, files, sharding, distributed, base, errors, ema, schedules.
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
