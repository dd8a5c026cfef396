"""Safetensors files: written and read by all ranks, each its own bytes; opened, read in slices, saved while training
goes on.

May import: sharding, distributed, base, errors."""
