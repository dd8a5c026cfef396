"""Merges of checkpoints, into files or straight into a model.

May import: files, model, ranks, base, errors."""
