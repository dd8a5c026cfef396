"""Models that begin without memory: built on meta, sharded, given memory and values, from files, rank 0 or their own
initialisation.

May import: merging, files, sharding, distributed, base, errors."""
