"""modelscope/twinkle's two FSDP2 strategies and its helpers for memory-efficient starts (its PR 117), on
shardow.wrap(), materialize(). Signatures and results are the origin's, but ``get_full_state_dict()`` gives rank 0 the
whole, with buffers and tied names, and the others {}; experts are left to the model's own sharding."""

from shardow.compat.twinkle.accelerate import AccelerateStrategy
from shardow.compat.twinkle.helpers import _broadcast_sharded_state_dict as _broadcast_sharded_state_dict
from shardow.compat.twinkle.helpers import _get_non_persistent_buffers as _get_non_persistent_buffers
from shardow.compat.twinkle.helpers import _rebind_optimizer as _rebind_optimizer
from shardow.compat.twinkle.helpers import _restore_non_persistent_buffers as _restore_non_persistent_buffers
from shardow.compat.twinkle.helpers import _unbind_optimizer_params as _unbind_optimizer_params
from shardow.compat.twinkle.helpers import fsdp_pretrained_load_context
from shardow.compat.twinkle.native import NativeFSDPStrategy

__all__ = ["AccelerateStrategy", "NativeFSDPStrategy", "fsdp_pretrained_load_context"]
