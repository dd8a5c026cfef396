"""Examples of Shardow; digits is the demo of `make demo`."""
