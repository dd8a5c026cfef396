"""Represents a torch model as each rank holds it.

It has weights and buffers under plain names, the region and the memory of each, and checks that these still hold.

May import: distributed, base, errors."""
