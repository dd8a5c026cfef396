"""EMA_FSDP: averages under the origin's names, on shardow.EMA."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import AbstractContextManager
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import nn

from shardow import Schedule, errors
from shardow.averages import state as _state
from shardow.averages.core import Averages
from shardow.averages.options import Replicas
from shardow.averages.tracked import Tracked, divide
from shardow.base.checks import invalid, one_of
from shardow.compat._impl.filling import load_averages
from shardow.compat.files.torch_files import whole_state_dict
from shardow.distributed.gather import Gatherer
from shardow.ema import EMA, model_averages
from shardow.model.match import compare
from shardow.model.names import called, model_and_root
from shardow.model.swap_guard import refuse_foreign
from shardow.model.view import ModelView, find
from shardow.schedules import as_schedules


class EMA_FSDP:
    """Averages of every parameter of ``fsdp_module``, frozen ones too, or of its ``.module``. Collective where ranks
    share it.

    Args:
        decay: weight kept on the old average, in [0, 1]; or a Schedule of shardow.schedules.
        start_step: until then updates copy the weights: in place of making the average late, at an ``ema_start_step``.
        device: where the averages live: the host, as in the origin; None: with their weights.
        replicas: "split": ranks that hold the same weights (HSDP, DDP) divide averages and work; "copy": as in the
            origin.
        group, timeout: as in shardow.EMA.

    ``ema`` is the shardow.EMA behind it, for stats(), distance(), export() and attach().
    """

    def __init__(
        self, fsdp_module: Any, decay: float | Schedule = 0.999, *, start_step: int = 0,
        device: torch.device | str | None = "cpu", replicas: Replicas = "split",
        group: dist.ProcessGroup | None = None, timeout: float | timedelta | None = None,
    ) -> None:  # fmt: skip
        self._model, root = model_and_root(fsdp_module)
        self.ema = EMA(
            self._model, decay, device=device, rule="mul_add", params="all", stochastic=False, start_step=start_step,
            replicas=replicas, group=group, timeout=timeout,
        )  # fmt: skip
        name_of = called(root)
        self._names = {name: name_of(name) for name in self._averages.averages()}  # {clean: the origin's}
        self._is_copy = False

    @property
    def _averages(self) -> Averages:
        return model_averages(self.ema)

    @property
    def decay(self) -> float:
        """Of the next update; may be set to a number or a Schedule at any time."""
        return self._averages.engine.decays[0]

    @decay.setter
    def decay(self, decay: float | Schedule) -> None:
        state = json.loads(self._averages.engine.state())
        state["schedules"] = [json.loads(schedule.to_json()) for schedule in as_schedules(decay)]
        self._averages.engine.set_state(json.dumps(state))

    @property
    def shadow(self) -> dict[str, torch.Tensor]:
        """This rank's float32 part of each average, by the names of ``fsdp_module.module.named_parameters()``: the
        memory itself. A part that is not the whole is 1-D, in the order of the weight's own memory."""
        return Shadow(self.state_dict())

    @shadow.setter
    def shadow(self, shadow: Mapping[str, torch.Tensor]) -> None:
        """As load_state_dict(), collective too."""
        self.load_state_dict(shadow)

    @torch.no_grad()
    def update(self, fsdp_module: Any = None) -> None:
        """After an optimizer step; no communication. Raises ValueError and KeyError where the module or a parameter is
        another one.
        """
        if fsdp_module is not None:
            self._refuse_other(fsdp_module)
        try:
            self.ema.update()
        except errors.InvalidArgumentError as error:
            raise invalid(str(error), KeyError) from None

    def _refuse_other(self, module: Any) -> None:
        model = self._model if module is self._model else model_and_root(module)[0]
        if self._is_copy and model is not self._model:
            self._follow(model)
        if model is not self._model and [*map(id, model.parameters())] != [*map(id, self._model.parameters())]:
            raise invalid(
                "update(): this is not the module that the averages are of; make an EMA_FSDP of it and load this "
                "one's state_dict()",
                KeyError,
            )

    def _follow(self, model: nn.Module) -> None:
        """A copy, or what comes out of a pickle, has a copy of the model; the first module that it is given takes its
        place.
        """
        made = EMA(model, self._averages.engine.schedules, **self._averages.arguments)
        made.load_state_dict(self.ema.state_dict())
        self.ema, self._model, self._is_copy = made, model, False

    def __getstate__(self) -> dict[str, Any]:
        """With a copy of the model. Raises NotImplementedError where ranks share it."""
        self._averages.to_copy("copied")
        return {**self.__dict__, "_is_copy": True}

    # ---- state

    def state_dict(self) -> dict[str, torch.Tensor]:
        """This rank's parts, without a copy, as ``shadow``; for load_state_dict() of the same sharding, and for
        torch.distributed.checkpoint. For the whole: full_state_dict(), save()."""
        return {self._names[name]: tensor for name, tensor in self._averages.averages().items()}

    def load_state_dict(self, sd: Mapping[str, torch.Tensor]) -> None:
        """This rank's parts, or full tensors on every rank, with or without wrappers in their keys. Collective. Raises
        ValueError, on every rank, with everything that does not fit, before anything changes."""
        load_averages(self._averages, sd, others=self._averages.view.buffers)

    def full_state_dict(self, fsdp_module: Any = None, key_style: str = "wrapped") -> dict[str, torch.Tensor]:
        """Whole float32 averages, fresh CPU tensors, on rank 0; {} elsewhere. Collective; live weights stay out of it;
        one tensor at a time travels.

        ``key_style``: "wrapped": as the origin's files (``model._fsdp_wrapped_module.blocks.0...``); "clean": the
        unwrapped model's.
        """
        style = self._averages.ranks.agree(
            "full_state_dict()", lambda: one_of("key_style", key_style, ("wrapped", "clean"))
        )
        full = self.ema.full_state_dict(complete=False)
        return full if style == "clean" else {self._names[name]: tensor for name, tensor in full.items()}

    def save(self, path: str | Path) -> None:
        """Resumable, every rank writing its own bytes; see shardow.EMA.save(). Collective."""
        self.ema.save(path)

    def load(self, path: str | Path) -> None:
        """What save() wrote, with its decay and step, at any world size and sharding. Collective."""
        self.ema.load(path)

    # ---- the averages in a model

    @torch.no_grad()
    def copy_to(self, fsdp_module: Any) -> None:
        """The averages, cast, into the parameters of a module with the same names: the live one, or another, sharded or
        not. Collective; no tensor travels where both are sharded alike and no replicas share the work.

        Raises ValueError and KeyError, before anything changes, where a name is on one side only or a shape differs.
        """
        averages = self._averages

        def ready() -> tuple[ModelView, list[Tracked]]:
            view = find(model_and_root(fsdp_module)[0], group=averages.ranks.process_group)
            written = _as_averaged(averages, view)
            averages.swap.refuse("copy_to()")
            view.reshard()
            refuse_foreign("copy_to()", lambda: [one.local.tensor for one in written], writes=True)
            return view, written

        view, written = averages.together("copy_to()", ready)
        pairs = list(zip(written, averages.tracked, strict=True))
        alike = all(there.region == here.region for there, here in pairs)
        if not averages.ranks.decide("copy_to()", b"" if alike else b"1", lambda _: b"1"):
            torch._foreach_copy_([there.weights() for there, _ in pairs], [here.averages[0] for _, here in pairs])
            for one in written:
                one.scatter()
            averages.share(written)
        else:
            _state.copy_streamed(Gatherer("copy_to()", averages.parts(), averages.ranks), view)
        view.bump_versions()
        view.reshard()

    def swapped(self) -> AbstractContextManager[None]:
        """``with ema.swapped():`` the live module holds the averages; afterwards its weights, bit for bit.
        Collective."""
        return self.ema.swapped()


class Shadow(dict[str, torch.Tensor]):
    """What ``shadow`` gives: entries are the averages' memory, and can't be exchanged. It is pickled as a dict."""

    def __setitem__(self, name: str, value: torch.Tensor) -> NoReturn:
        way_out = f"write shadow[{name!r}].copy_(...), or assign the whole: shadow = {{...}}"
        raise invalid(f"shadow[{name!r}] = ... would change a dict and no average; {way_out}", TypeError)

    def __reduce__(self) -> Any:
        return dict, (dict(self),)


def fsdp_state_dict(model: nn.Module) -> dict[str, torch.Tensor]:
    """Whole CPU tensors of the live model, parameters and persistent buffers, under clean names, on rank 0; {}
    elsewhere. Collective.
    """
    return whole_state_dict(model)


def _as_averaged(averages: Averages, view: ModelView) -> list[Tracked]:
    """The parameters of ``view`` in the order of the averages. Raises KeyError, a ValueError too, with the names that
    don't fit.
    """
    places = {local.name: local for local in view.parameters}
    shapes = {row.name: tuple(row.local.region.shape) for row in averages.tracked}
    fit = compare(shapes, {name: tuple(local.region.shape) for name, local in places.items()})
    fit.refuse("copy_to()", "the module", KeyError, here="in the averages", done="nothing was copied")
    chosen = [places[name] for name in shapes]
    return [Tracked(local, *divide(local, averages.options.replicas)) for local in chosen]
