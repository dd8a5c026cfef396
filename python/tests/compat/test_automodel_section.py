"""NeMo Automodel: the YAML section."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import models
import pytest
import ranks

from shardow.compat.automodel import EMAManager, ShardedModelEMAManager, build_ema


@pytest.mark.parametrize(
    "cfg", [None, {"decay": None}, {"decay": None, "implementation": "shadow"}, SimpleNamespace(decay=None)]
)
def test_no_section_or_no_decay_is_no_average(cfg: Any) -> None:
    assert build_ema(cfg, models.make()) is None


class Node:
    """As Automodel's ConfigNode gives itself."""

    def to_dict(self) -> dict[str, Any]:
        return {"decay": "0.75", "implementation": "auto"}


@pytest.mark.parametrize(
    ("cfg", "decay"),
    [
        ({}, 0.9999),
        ({"decay": 0.75}, 0.75),
        (SimpleNamespace(decay=0.75, implementation="shadow"), 0.75),
        (Node(), 0.75),
    ],
)
def test_sections_of_every_kind_are_read(cfg: Any, decay: float) -> None:
    found = build_ema(cfg, models.make())
    assert isinstance(found, EMAManager)
    assert found.decay == decay


def _auto() -> None:
    for sharding, init_mode, expected in (
        ("fsdp2", "hf_backbones", ShardedModelEMAManager),
        ("fsdp2", "auto", EMAManager),
        ("ddp", "hf_backbones", EMAManager),
    ):
        build = lambda sharding=sharding: models.build(sharding, 2)  # noqa: E731
        assert type(build_ema({"decay": 0.9}, build(), build, init_mode)) is expected


def test_auto_is_a_second_model_for_hf_backbones_under_fsdp2() -> None:
    ranks.run(2, _auto)


@pytest.mark.parametrize(
    ("cfg", "says"),
    [
        ({"decay": 0.9, "warmup": 3}, "unknown option.*warmup"),
        ({"decay": 0.9, "implementation": "fast"}, "Unsupported ema.implementation='fast'"),
        ({"decay": 0.9, "implementation": "sharded_model"}, "requires model.init_mode='hf_backbones'"),
        ({"decay": 2}, "decay must be in"),
        ({"decay": "much"}, "could not convert|not a number"),
        ({"decay": []}, "not a number"),
        (3, "ema is a int"),
    ],
)
def test_sections_that_make_no_sense_are_refused(cfg: Any, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        build_ema(cfg, models.make())
    with pytest.raises(ValueError, match="build_ema_model"):
        build_ema({"implementation": "sharded_model"}, models.make(), init_mode="hf_backbones")
