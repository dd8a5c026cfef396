"""Fills the master weights in float32 that DeepSpeed's optimizers keep. Each step makes the weights anew from them:
filling the weights alone has no effect. DeepSpeed is not imported: parameters bear its marks."""

from __future__ import annotations

from typing import Any

import torch

from shardow.base.checks import unsupported
from shardow.sharding.local_state import LocalState
from shardow.sharding.zero3 import begin_of, is_partitioned


def master_of(parameter: Any) -> tuple[torch.Tensor, int] | None:
    """Returns this rank's range of a parameter's master and the number of its first element; None where DeepSpeed
    marked no master: the parameter is not trained, or each rank has all of its master."""
    if is_partitioned(parameter):
        optimizer = getattr(parameter, "_z3_optimizer", None)
        if optimizer is None or not parameter.requires_grad:
            return None
        if optimizer.get_param_id(parameter) not in optimizer.grad_position:
            return None
        master, begin = optimizer.get_local_fp32_param(parameter).detach(), begin_of(parameter)
        return master[: min(master.numel(), parameter.ds_numel - begin)], begin  # without its padding
    if not hasattr(parameter, "_hp_mapping"):
        return None
    link = parameter._hp_mapping
    if link is None:  # other ranks have all of it
        return torch.empty(0, device=parameter.device), 0
    return link.hp_fragment.detach(), link.lp_fragment_address.start


def fill_masters_too(held: LocalState) -> None:
    """Changes ``held`` so that filling it fills the masters: ZeRO-3's first, and the weights from them; other masters
    from the weights. Raises where that is impossible.
    """
    if held.view is None:
        return
    parameters = {local.name: local.shown for local in held.view.parameters}
    for number, part in enumerate(held.parts):
        if (parameter := parameters.get(part.name)) is None:
            continue
        if getattr(getattr(parameter, "_z3_optimizer", None), "swap_optimizer", False):
            hint = "load before deepspeed.initialize(), or offload to 'cpu'"
            raise unsupported(
                f"'{part.name}' has its master on NVMe, from which the next step would bring back the old weights: "
                f"{hint}"
            )
        if (fragment := master_of(parameter)) is None or not fragment[0].numel():
            continue
        master, first = fragment
        if is_partitioned(parameter):
            held.parts[number] = part._replace(flat=master)
            held.copied.append((part.flat, master))
        else:
            weights = part.flat[first : first + master.numel()]
            _refuse_unlike(part.name, weights, master)
            held.copied.append((master, weights))


def _refuse_unlike(name: str, weights: torch.Tensor, master: torch.Tensor) -> None:
    """Raises where the two differ: under round_robin_gradients DeepSpeed marks parameters with masters of others."""
    if not torch.equal(weights.view(torch.uint8), master.to(weights.device, weights.dtype).view(torch.uint8)):
        why = "the weights were written since, or round_robin_gradients mixes masters up"
        raise unsupported(f"'{name}' differs from its optimizer's master: {why}; load before deepspeed.initialize()")
