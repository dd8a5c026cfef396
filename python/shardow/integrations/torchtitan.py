"""Averages in torchtitan: a component with a Config, and a Trainer that has it.

    config = AveragedTrainer.Config(..., ema=EMAWeights.Config(enable=True, half_life_fraction=0.05))
    trainer = config.build()
    trainer.train()  # goes on from its checkpoint, averages too; validates with them
    trainer.ema.averages.export("run/model")

Released versions have no averages; the options have the names of those that are on their way there, and checkpoints the
keys, `ema_optimizer.state.NAME.ema_params`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.stateful import Stateful
from torchtitan.config import Configurable
from torchtitan.trainer import Trainer

from shardow import schedules
from shardow.base.checks import fraction, invalid, unsupported, whole
from shardow.ema import EMA

__all__ = ["AveragedTrainer", "EMAWeights"]

KEY = "ema_optimizer"
_STATE = "shardow.state"


class EMAWeights(Stateful, Configurable):
    """Averages of the model, sharded as it is. They begin with the weights of the first step, after what the
    checkpointer has loaded.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(Configurable.Config):
        enable: bool = False
        """Whether weights are averaged"""

        decay: float | None = None
        """Weight kept on the old averages by each update; None: by half_life_fraction"""

        half_life_fraction: float = 0.05
        """Half-life as a fraction of the updates so far"""

        start_step: int = 0
        """Step whose weights the averages begin with; 0: those before the first step"""

        update_every_n_steps: int = 1
        """Steps from one update to the next; each decays once"""

        validate: bool = True
        """Whether validation runs with the averages"""

    def __init__(self, config: Config, *, model_parts: list[nn.Module]) -> None:
        self.config = config
        if not config.enable:
            return
        if len(model_parts) != 1:
            raise unsupported(f"ema: {len(model_parts)} model parts; averages of pipeline stages are not supported")
        self._every = whole("ema.update_every_n_steps", config.update_every_n_steps, 1)
        self._first = whole("ema.start_step", config.start_step, 0)
        rule = (
            schedules.half_life_fraction(config.half_life_fraction)
            if config.decay is None
            else fraction("ema.decay", config.decay)
        )
        self._begun = False
        # Updates are counted, not steps. With a start_step, the first one copies the weights.
        self.averages = EMA(model_parts[0], rule, start_step=min(self._first, 1))

    def before_step(self) -> None:
        """Where nothing was loaded, the averages begin here. Collective at the first step."""
        if not self._begun:
            self._begun = True
            self.averages.reset()

    def step(self, current_step: int) -> None:
        """After the optimizer's step of that number."""
        elapsed = current_step - self._first
        if elapsed >= 0 and elapsed % self._every == 0:
            self.averages.update()

    def state_dict(self) -> dict[str, Any]:
        state = self.averages.state_dict()
        return {_STATE: state["state"], **{f"state.{name}.ema_params": one for name, one in state["averages"].items()}}

    @torch.no_grad()
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        averages = {
            key[6:-11]: one
            for key, one in state_dict.items()
            if key.startswith("state.") and key.endswith(".ema_params")
        }
        self.averages.load_state_dict({"averages": averages, "state": state_dict[_STATE]})
        self._begun = True


class AveragedTrainer(Trainer):
    """torchtitan's Trainer with averages: ``trainer.ema``. To go on from a checkpoint that has none, name
    ``ema_optimizer`` in ``checkpoint.exclude_from_loading``: they begin with its weights then."""

    @dataclass(kw_only=True, slots=True)
    class Config(Trainer.Config):
        ema: EMAWeights.Config = field(default_factory=EMAWeights.Config)

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        if config.ema.enable and self.parallel_dims.pp_enabled:
            raise unsupported("ema: averages of pipeline stages are not supported")
        self.ema = config.ema.build(model_parts=self.model_parts)
        if not config.ema.enable:
            return
        if self.checkpointer.enable:
            if KEY in self.checkpointer.states:
                raise invalid(f"the checkpointer has {KEY!r} already: disable this torchtitan's own averages")
            self.checkpointer.states[KEY] = self.ema
        self.optimizers.register_step_pre_hook(lambda *_: self.ema.before_step())
        self.optimizers.register_step_post_hook(lambda *_: self.ema.step(self.step))
        if config.validator.enable and config.ema.validate:
            self._validate, self.validator.validate = self.validator.validate, self._validate_averages

    def _validate_averages(self, *args: Any, **kwargs: Any) -> Any:
        with self.ema.averages.swapped():
            return self._validate(*args, **kwargs)
