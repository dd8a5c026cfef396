"""Ctrl-C in a round whose verdict was given in the same moment: the others have what they need and go on. What ranks do
that are interrupted anywhere else: ``src/group/rounds_test.cc``."""

from __future__ import annotations

import contextlib
import threading

import pytest
from emulated import emulated

import shardow
from shardow.base import signals

TIMEOUT = 20.0


@pytest.mark.parametrize("held", [True, False])
def test_where_signals_are_held_the_rank_goes_on_too_and_else_it_ends_the_next_round(
    held: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    both, answers, waits = [b"zero", b"one"], [], threading.Event()

    def come_late() -> None:
        waits.wait(TIMEOUT)
        answers.append(groups[1].all_gather(b"one", TIMEOUT))

    late = threading.Thread(target=come_late)

    def interrupt_when_over() -> None:
        waits.set()
        if late.is_alive():
            late.join()
            raise KeyboardInterrupt

    monkeypatch.setattr(signals, "deliver", interrupt_when_over)
    with emulated(2) as groups:
        for group in groups:
            group.begin("a call", TIMEOUT)
        late.start()
        with (
            pytest.raises(KeyboardInterrupt),
            signals.DeferredSignals(waits=True) if held else contextlib.nullcontext(),
        ):
            answers.append(groups[0].all_gather(b"zero", TIMEOUT))
        assert answers == [both] * (2 if held else 1)
        if not held:
            with pytest.raises(shardow.errors.PeerFailedError, match="rank 0 was interrupted in a call"):
                groups[1].all_gather(b"", TIMEOUT)
        again = threading.Thread(target=come_late)
        again.start()
        assert groups[0].all_gather(b"zero", TIMEOUT) == both
        again.join()
