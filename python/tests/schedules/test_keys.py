"""What averages are called: the engine prints numbers as Python does, so that names of files and states never depend on
who wrote them.
"""

from __future__ import annotations

import json
import math
import random
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

import shardow
from shardow import _core
from shardow.files.reading import choose

BEYOND = 1e16  # from here on Python's repr has an exponent, also of whole numbers


def printed(number: float) -> str:
    """Whole numbers as JSON's integers, which have no point."""
    return repr(int(number)) if number < BEYOND and number == int(number) else repr(number)


def of(number: float) -> tuple[str, str]:
    """(key, the same by what Python reads in the JSON)."""
    schedule = shardow.schedules.half_life(number)
    return schedule.key(), f"half_life(steps={json.loads(schedule.to_json())['steps']!r})"


@pytest.mark.parametrize(
    "number",
    [
        1e-05,
        0.0001,
        0.1,
        2 / 3,
        1.0,
        1e15,
        9999999999999998.0,
        1e16,
        1.5e16,
        2.0**53,
        1e22,
        1e23,
        5e-324,
        1.7976931348623157e308,
    ],
)
def test_a_number_is_printed_as_python_prints_it(number: float) -> None:
    assert of(number) == (f"half_life(steps={printed(number)})",) * 2


@given(st.floats(min_value=5e-324, allow_infinity=False))
def test_any_number_is_printed_as_python_prints_it(number: float) -> None:
    assert of(number) == (f"half_life(steps={printed(number)})",) * 2


def test_many_bit_patterns_are_printed_as_python_prints_them() -> None:
    pick, different = random.Random(5), []
    for _ in range(100_000):
        number = abs(struct.unpack("<d", pick.randbytes(8))[0])
        if (
            math.isfinite(number)
            and number > 0
            and shardow.schedules.half_life(number).key() != f"half_life(steps={printed(number)})"
        ):
            different.append(number)
    for _ in range(100_000):  # as decays are: many nines, and short ones
        number = pick.choice(
            [1 - 10 ** -pick.uniform(0, 16), round(pick.random(), pick.randrange(1, 17)), 10 ** -pick.uniform(0, 9)]
        )
        if shardow.schedules.constant(number).key() != printed(number):
            different.append(number)
    assert different == []


def test_a_decay_without_a_fraction_is_chosen_by_its_number() -> None:
    keys = _core.decay_keys([shardow.schedules.constant(decay) for decay in (0, 0.25, 1)])
    assert [choose(keys, decay) for decay in (0, 0.0, 0.25, 1, 1.0, "1")] == [0, 0, 1, 2, 2, 2]


def test_keys_go_through_metadata_and_into_names() -> None:
    kinds = [
        shardow.schedules.constant(1e-05),
        shardow.schedules.power(0.1),
        shardow.schedules.half_life_fraction(0.09),
    ]
    keys = ["1e-05", "power(sigma_rel=0.1)", "half_life_fraction(fraction=0.09)"]
    state = json.dumps({"schedules": [json.loads(one.to_json()) for one in kinds]})
    assert _core.decay_keys(kinds) == keys
    assert _core.decay_keys_in({_core.STATE_KEY: state}) == keys
    assert _core.decay_keys_in({_core.STATE_KEY: state[:-1]}) == []
    assert [_core.ema_file_name(key) for key in keys[:2]] == [
        "ema-1e-05.safetensors",
        "ema-power-sigma_rel=0.1.safetensors",
    ]
    with pytest.raises(ValueError, match=r"decay 1e-05 is given twice; each average needs a decay of its own"):
        _core.decay_keys([kinds[0], *kinds])
