"""Updates an EMA after optimizer steps: of one optimizer, or of several that share a training step."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable
from typing import Any

import torch

from shardow import errors
from shardow.base.checks import invalid, number, warn

#: Training samples of one step, all ranks together; or a function that returns how many have been seen so far.
Samples = float | Callable[[], float]


_attached: weakref.WeakKeyDictionary[torch.optim.Optimizer, weakref.WeakSet[Handle]] = weakref.WeakKeyDictionary()


class Handle:
    """Detaches an EMA from an optimizer; as a context manager, at the end of the block. Neither it nor the optimizer
    keeps the EMA alive: an EMA that is dropped is detached."""

    def __init__(self, attachments: Attachments, optimizer: torch.optim.Optimizer, samples: Samples | None) -> None:
        self._attachments, self._samples = weakref.ref(attachments), samples
        self._optimizer = optimizer
        reference = weakref.ref(self)

        def call(method: Callable[[Attachments, Handle], None]) -> None:
            if (handle := reference()) is not None and (owner := handle._attachments()) is not None:
                method(owner, handle)

        hooks = contextlib.ExitStack()
        hooks.callback(optimizer.register_step_pre_hook(lambda *_: call(Attachments.before)).remove)
        hooks.callback(optimizer.register_step_post_hook(lambda *_: call(Attachments.after)).remove)
        self._detach = weakref.finalize(attachments, hooks.close)
        self._detach.atexit = False
        _attached.setdefault(optimizer, weakref.WeakSet()).add(self)

    def remove(self) -> None:
        """Ends this attachment alone, once; a second call does nothing."""
        if (attachments := self._attachments()) is not None and self._detach.alive:
            attachments.remove(self)
        self._detach()

    def __enter__(self) -> Handle:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()


class Attachments:
    """The optimizers that an EMA is attached to. A training step is one round: each optimizer steps once, or is
    skipped. The update of a round follows the step of the optimizer that was attached last; where a GradScaler skips
    that step, the update comes before the next round."""

    def __init__(self, update: Callable[[Samples | None, bool], None]) -> None:
        """``update(samples, at_once)`` makes an update; ``at_once``: a step follows it that changes the weights that it
        reads."""
        self._update = update
        self._all: list[Handle] = []
        self._stepped: list[Handle] = []  # in this round

    def refuse_update(self, overlap: bool) -> None:
        """Raises where update() may not be called by hand."""
        if self._all:
            raise invalid("update() while attached would count each step twice; handle.remove() first")
        if overlap:
            why = "nothing would keep the next step from changing weights that are still being averaged"
            raise invalid(f"update() with overlap=True: {why}; attach(optimizer), whose step waits, or drop overlap")

    def add(self, optimizer: Any, samples: Samples | None) -> Handle:
        inner = _innermost(optimizer)
        if any(handle._optimizer is inner for handle in self._all):
            raise invalid("attached to this optimizer already; each step would count twice")
        if samples is not None and not callable(samples) and not (samples := number("samples", samples)) > 0:
            raise invalid(f"samples={samples}; give the samples of one step, above 0, or a function")
        if any("train_mode" in group for group in inner.param_groups):
            warn(
                f"{type(inner).__name__} averages by itself (Defazio et al., arXiv 2405.15682): after its eval() the "
                "weights are averages "
                "already, before it the points between; an average of either lags further behind than its decay says"
            )
        if any(other._detach.alive for other in _attached.get(inner, ())):
            warn(
                f"another EMA is attached to this {type(inner).__name__}, and goes on averaging after its steps; where "
                "it is left over, its detach() ends that"
            )
        self._all.append(Handle(self, inner, samples))
        return self._all[-1]

    def remove_all(self) -> None:
        for handle in list(self._all):
            handle.remove()

    def remove(self, handle: Handle) -> None:
        for handles in (self._all, self._stepped):
            if handle in handles:
                handles.remove(handle)

    def before(self, handle: Handle) -> None:
        """Ends the last round before an optimizer begins the next; the swap guard has allowed the step."""
        if handle in self._stepped:
            self.settle(at_once=True)

    def after(self, handle: Handle) -> None:
        if _skipped(handle._optimizer):
            return
        self._stepped.append(handle)
        if handle is self._all[-1]:
            self.settle()

    def settle(self, at_once: bool = False) -> None:
        """Makes the update of a round that has begun."""
        if self._stepped:
            self._stepped.clear()
            samples = (handle._samples for handle in self._all if handle._samples is not None)
            self._update(next(samples, None), at_once)


def _innermost(optimizer: Any) -> torch.optim.Optimizer:
    """Returns torch's optimizer inside a wrapper that keeps it as ``.optimizer``, and takes no hooks itself, as
    accelerate's."""
    inner = optimizer
    while not hasattr(inner, "_optimizer_step_post_hooks") and hasattr(inner, "optimizer"):
        inner = inner.optimizer
    if not hasattr(inner, "_optimizer_step_post_hooks"):
        takes = "attach() takes a torch.optim.Optimizer, or a wrapper with one as .optimizer"
        raise errors.UnknownOptionError(f"{takes}, not a {type(optimizer).__name__}; call update() after its steps")
    return inner  # type: ignore[no-any-return]


def _skipped(optimizer: torch.optim.Optimizer) -> bool:
    """Returns whether a GradScaler skipped the step: it leaves that to fused optimizers, with an attribute. On CUDA the
    answer waits for the device."""
    found_inf = getattr(optimizer, "found_inf", None)
    return isinstance(found_inf, torch.Tensor) and bool(found_inf.item())
