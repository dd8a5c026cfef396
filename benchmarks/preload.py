"""What ranks of benchmarks have imported before they are forked: imports are not what is measured."""

import accelerate.utils.fsdp_utils  # noqa: F401
import safetensors.torch  # noqa: F401
import torch
import torch.distributed.checkpoint.state_dict
import torch.distributed.fsdp

import shardow.materializing
import shardow.meta  # noqa: F401

torch.nn.Linear(1, 1, device="meta")  # imports torch's compiler
