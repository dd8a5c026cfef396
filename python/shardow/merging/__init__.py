"""Merges of checkpoints, into files or straight into a model.

May import: files, sharding, distributed, base, errors."""
