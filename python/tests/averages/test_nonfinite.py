"""Weights that are NaN or Inf."""

from __future__ import annotations

import math
import warnings

import pytest
import torch
from small import DECAY
from torch import nn

import shardow


class TestNonFinite:
    def test_holds_counts_and_warns_once(self) -> None:
        model = nn.Linear(4, 4)
        ema = shardow.EMA(model, DECAY)
        before = ema.full_state_dict(complete=False)
        with torch.no_grad():
            model.weight[1, 2] = math.nan
            model.bias[0] = -math.inf
        with pytest.warns(RuntimeWarning, match="2 weights"):
            ema.update()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            ema.update()
        after = ema.full_state_dict(complete=False)
        assert after["weight"][1, 2] == before["weight"][1, 2]
        assert all(t.isfinite().all() for t in after.values())
        assert ema.stats()["held_nonfinite"] == 4

    def test_raise_names_the_tensor_and_has_made_and_counted_the_update_that_hold_makes(self) -> None:
        model = nn.Linear(4, 4)
        ema, holds = shardow.EMA(model, DECAY, nonfinite="raise"), shardow.EMA(model, DECAY)
        with torch.no_grad():
            model.weight += 1
            model.bias[0] = math.nan
        with pytest.raises(ValueError, match=r"'bias'.*which is counted"):
            ema.update()
        with pytest.warns(RuntimeWarning, match="1 weights"):
            holds.update()
        assert ema.step == holds.step == 1
        assert ema.stats()["held_nonfinite"] == 1
        for name, average in holds.full_state_dict(complete=False).items():
            assert ema.full_state_dict(complete=False)[name].equal(average)

    def test_propagate_is_ordinary_arithmetic(self) -> None:
        model = nn.Linear(4, 4)
        ema = shardow.EMA(model, DECAY, nonfinite="propagate")
        with torch.no_grad():
            model.bias[0] = math.nan
        ema.update()
        assert ema.full_state_dict(complete=False)["bias"].isnan().tolist() == [True, False, False, False]

    def test_after_reset_it_is_warned_of_again(self) -> None:
        model = nn.Linear(4, 4)
        ema = shardow.EMA(model, DECAY)
        for bad in (math.nan, math.inf):
            ema.reset()
            with torch.no_grad():
                model.bias[0] = bad
            with pytest.warns(RuntimeWarning, match="1 weights"):
                ema.update()
            with torch.no_grad():
                model.bias[0] = 1
