"""Whole checkpoints of a training run: model, averages, optimizers, schedulers, values, random generators; which are
there, which stay.

May import: ema, averaging, files, sharding, distributed, base, errors."""
