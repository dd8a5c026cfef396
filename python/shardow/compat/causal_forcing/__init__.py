"""``utils/distributed.py`` of Self-Forcing (guandeh17), Causal-Forcing (thu-ml) and their kin: EMA_FSDP, fsdp_wrap(),
fsdp_state_dict(), and the model.pt of their trainers. Names, arithmetic (``shadow.mul_(d).add_(p.float(), alpha=1 -
d)``) and keys are the origin's; averages live where the weights are."""

from shardow.compat.causal_forcing.ema_fsdp import EMA_FSDP, fsdp_state_dict
from shardow.compat.causal_forcing.model_pt import load_model_pt, read_model_pt, write_model_pt
from shardow.compat.causal_forcing.wrapping import barrier, fsdp_wrap, launch_distributed_job

__all__ = [
    "EMA_FSDP", "barrier", "fsdp_state_dict", "fsdp_wrap", "launch_distributed_job", "load_model_pt", "read_model_pt",
    "write_model_pt",
]  # fmt: skip
