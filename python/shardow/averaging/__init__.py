"""The implementation behind EMA: options, the averages' memory, their state, the swap with the weights, their files.

May import: files, sharding, distributed, base, errors, schedules."""
