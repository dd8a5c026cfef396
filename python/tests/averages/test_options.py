"""Options of an EMA that are refused, or warned about."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from small import make_model

import shardow

BAD_OPTIONS: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"decay": 1.5}, ValueError, "1.5"),
    ({"decay": -0.1}, ValueError, "-0.1"),
    ({"decay": math.nan}, ValueError, "nan"),
    ({"decay": []}, ValueError, "decay"),
    ({"decay": [0.9, 0.9]}, ValueError, "twice"),
    ({"decay": "fast"}, (ValueError, TypeError), "fast"),  # type: ignore[list-item]
    ({"momentum": 0.1}, TypeError, r"decay=0\.9"),
    ({"colour": 1}, TypeError, "colour"),
    ({"dtype": torch.int32}, ValueError, "int32"),
    ({"replicas": "share"}, ValueError, "'split', 'copy'"),
    ({"params": "some"}, ValueError, "'trainable', 'all'"),
    ({"params": lambda *_: False}, ValueError, "no parameter"),
    ({"buffers": "yes"}, ValueError, "'copy'"),
    ({"rule": "sum"}, ValueError, "'lerp'"),
    ({"stochastic": "maybe"}, ValueError, "'auto'"),
    ({"rule": "mul_add", "stochastic": True}, ValueError, "lerp"),
    ({"nonfinite": "zero"}, ValueError, "'hold'"),
    ({"update_every": 0}, ValueError, "at least 1"),
    ({"start_step": -1}, ValueError, "at least 0"),
    ({"threads": -1}, ValueError, "at least 0"),
    ({"timeout": 0}, ValueError, "more than 0"),
    ({"optimizer": "adam"}, TypeError, "attach"),
    ({"device": "cuda"}, NotImplementedError, "cuda"),
    ({"source": {"nothing": torch.ones(1)}}, ValueError, "nothing"),
    ({"source": {"3.weight": torch.ones(1)}}, ValueError, "3.weight"),
]


NAMES = [f"{index}-{next(iter(options), None)}" for index, (options, _, _) in enumerate(BAD_OPTIONS)]


@pytest.mark.parametrize(("options", "error", "says"), BAD_OPTIONS, ids=NAMES)
def test_bad_options_are_refused(options: dict[str, Any], error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says) as caught:
        shardow.EMA(make_model(), **options)
    if options.get("decay") != "fast" and "colour" not in options:  # an unknown keyword is Python's own TypeError
        assert isinstance(caught.value, shardow.Error)


def test_a_small_decay_warns_that_it_looks_like_a_lerp_weight() -> None:
    with pytest.warns(UserWarning, match="lerp"):
        shardow.EMA(make_model(), 0.001)
