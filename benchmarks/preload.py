"""What ranks of benchmarks have imported before they are forked: imports are not what is measured."""

import accelerate.utils.fsdp_utils  # noqa: F401
import safetensors.torch  # noqa: F401
import torch
import torch.distributed.checkpoint.state_dict
import torch.distributed.fsdp

import shardow.start.materialize

with torch.device("meta"):  # imports torch's compiler
    torch.nn.Sequential(torch.nn.Embedding(2, 2), torch.nn.LayerNorm(2), torch.nn.Linear(2, 2))
with shardow.meta_init():
    torch.nn.Linear(2, 2)
