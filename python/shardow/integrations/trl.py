"""TRL's BEMACallback, sharded and resumable: averages with a correction of their lag (Block and Zhang, arXiv
2508.00180).

After step t, every ``update_freq`` steps from ``update_after`` on,

    average <- (1 - beta) average + beta weights,   beta  = max(min_ema_multiplier, (lag + multiplier t)^-ema_power)
    BEMA    =  average + alpha (weights - first),   alpha = (lag + multiplier t)^-bias_power

where ``first`` are the weights of step ``update_after``. Upstream keeps average, first weights and BEMA whole on the
CPU, on every rank; here a rank has its part of each, and they are in the Trainer's checkpoints, where upstream begins
anew.
"""

from __future__ import annotations

from typing import Any

import torch
from accelerate.utils import extract_model_from_parallel

from shardow.base.checks import invalid
from shardow.ema import EMA
from shardow.integrations.common import Missing, averages_of, save_pretrained
from shardow.integrations.transformers import EMACallback

__all__ = ["BEMACallback"]

_ALWAYS = 2**62  # as start_step: every update copies the weights


class BEMACallback(EMACallback):
    """``callback.ema`` are the BEMA weights: with AveragedTrainer they are evaluated and exported. Saved in
    ``output_dir``/bema at the end.

    Args: as trl.BEMACallback's, but that ``device`` is the weights' own unless given. missing, options: of EMACallback;
    no decay.
    """

    def __init__(
        self,
        update_freq: int = 400,
        ema_power: float = 0.5,
        bias_power: float = 0.2,
        lag: int = 10,
        update_after: int = 0,
        multiplier: float = 1.0,
        min_ema_multiplier: float = 0.0,
        device: str | None = None,
        *,
        missing: Missing = "error",
        **options: Any,
    ) -> None:
        if refused := {"decay", "start_step", "update_every", "use"} & {*options}:
            raise invalid(f"BEMACallback() has rules of its own in place of {', '.join(sorted(refused))}")
        super().__init__(1.0, missing=missing, start_step=_ALWAYS, device=device, **options)
        self.update_freq, self.update_after = update_freq, update_after
        self.ema_power, self.bias_power = ema_power, bias_power
        self.lag, self.multiplier, self.min_ema_multiplier = lag, multiplier, min_ema_multiplier

    def begin(self, model: Any) -> None:
        super().begin(model)
        self._average, self._first = averages_of(model, self.options), averages_of(model, self.options)
        self.files.update({"bema-average.safetensors": self._average, "bema-first.safetensors": self._first})

    def follow(self, *optimizers: Any, samples: Any = None) -> None:
        """Steps are the Trainer's, as in upstream."""

    @torch.no_grad()
    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        step = state.global_step
        if step == self.update_after:
            self._first.reset()
            self._average.reset()
        elif step > self.update_after and (step - self.update_after) % self.update_freq == 0:
            assert self.ema is not None
            age = self.lag + self.multiplier * step
            beta, alpha = max(age**-self.ema_power, self.min_ema_multiplier), age**-self.bias_power
            self.ema.update(step)  # the weights, this rank's part in the averages' dtype
            for bema, average, first in zip(_parts(self.ema), _parts(self._average), _parts(self._first), strict=True):
                average.mul_(1 - beta).add_(bema, alpha=beta)
                bema.sub_(first).mul_(alpha).add_(average)

    def on_train_end(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        super().on_train_end(args, state, control)
        assert self.ema is not None
        unwrapped = extract_model_from_parallel(model, keep_torch_compile=False)
        save_pretrained(self.ema, unwrapped, f"{args.output_dir}/bema", main=state.is_world_process_zero)


def _parts(ema: EMA) -> list[torch.Tensor]:
    """Of this rank: an EMA's own memory."""
    return [getattr(one, "local", one) for one in ema.state_dict()["averages"].values()]
