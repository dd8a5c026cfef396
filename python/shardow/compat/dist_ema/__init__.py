"""ckczzj/DistEMA: averages of a replicated model, cut into one equal stretch for each rank, on shardow's engine and
files. Names, signatures, the partition, the recursion ``e.mul_(d).add_(p, alpha=1 - d)`` and the warm-up are the
origin's."""

from shardow.compat.dist_ema.ema import PRECISION_TO_TYPE, DistEMA, requires_grad

__all__ = ["PRECISION_TO_TYPE", "DistEMA", "requires_grad"]
