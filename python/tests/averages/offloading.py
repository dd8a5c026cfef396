"""A training on the fake device beside the same one on the CPU, for tests of averages on the host."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest
import torch
import trainings
from fake_device import Device
from own_averages import averages_of
from torch import nn

if TYPE_CHECKING:
    import shardow


class Training:
    """A model on the device, and its twin on the CPU that does the same."""

    def __init__(self, device: Device, attached: bool = True, decay: Any = 0.5, **options: Any) -> None:
        import shardow

        self.device = device
        self.models = [made(), made()]
        device.hold(self.models[0])
        self.optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in self.models]
        how = {"ring_bytes": trainings.SMALLEST_RING, "device": "cpu", **options}
        resident = {name: value for name, value in options.items() if name != "ring_bytes"}
        self.emas = [
            shardow.EMA(model, decay, **given, optimizer=optimizer if attached else None)
            for model, optimizer, given in zip(self.models, self.optimizers, (how, resident), strict=True)
        ]

    def step(self, number: int, which: int | None = None) -> None:
        for at in (0, 1) if which is None else (which,):
            trainings.give_gradients(self.models[at], number)
            self.optimizers[at].step()

    def averages(self, which: int) -> dict[str, torch.Tensor]:
        ema = self.emas[which]
        return {f"{decay}/{name}": value for decay in ema.decays for name, value in ema.full_state_dict(decay).items()}

    def check(self) -> None:
        trainings.same(self.averages(0), self.averages(1))


def made() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(40, 41), nn.Linear(41, 2))


@contextlib.contextmanager
def late(ema: shardow.EMA) -> Iterator[None]:
    """Nothing waits for updates, which begin some time after the next step: what hooks are there for."""
    from shardow._core import hooks  # type: ignore[attr-defined]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(averages_of(ema).swap, "finish_reading", lambda: None)
        patch.setattr(
            averages_of(ema).swap,
            "ready_to_update",
            lambda: (hooks.hold_updates(False), averages_of(ema).wait(), hooks.hold_updates(True)),
        )
        yield
    hooks.hold_updates(False)


def hold_updates_a_while() -> threading.Timer:
    """Updates in the background begin when the timer ends: after a forward that does not wait for them."""
    from shardow._core import hooks  # type: ignore[attr-defined]

    hooks.hold_updates(True)
    timer = threading.Timer(0.1, hooks.hold_updates, [False])
    timer.start()
    return timer
