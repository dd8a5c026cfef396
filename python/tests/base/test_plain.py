"""What a scheduler or a program keeps comes back from JSON as it was, type and all; anything else is refused by
name."""

from __future__ import annotations

import json
import math
from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import shardow
from shardow.base import plain

SCALARS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary(max_size=9)
KEYS = st.text(max_size=4) | st.integers() | st.sampled_from(["$tuple", "$", ""])
VALUES = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=4) | st.lists(inner, max_size=4).map(tuple) | st.dictionaries(KEYS, inner, max_size=4)
    ),
    max_leaves=12,
)


def kinds(value: Any) -> Any:
    """Types all the way down: True == 1 == 1.0."""
    if isinstance(value, (list, tuple)):
        return type(value), [kinds(one) for one in value]
    if isinstance(value, dict):
        return type(value), [(kinds(key), kinds(one)) for key, one in value.items()]
    return type(value), value


@given(VALUES)
def test_what_goes_in_comes_out(value: Any) -> None:
    text = json.dumps(plain.encode(value, "it"), allow_nan=False)
    assert kinds(plain.decode(json.loads(text))) == kinds(value)


def test_milestones_and_numbers_that_json_lacks_come_out() -> None:
    value = {
        "milestones": Counter({30: 1, 80: 2}),
        "best": math.inf,
        "worst": -math.inf,
        "lost": math.nan,
        "betas": (0.9, 0.999),
    }
    found = plain.decode(json.loads(json.dumps(plain.encode(value, "it"), allow_nan=False)))
    assert type(found["milestones"]) is Counter
    assert math.isnan(found.pop("lost"))
    assert found == {name: one for name, one in value.items() if name != "lost"}


@pytest.mark.parametrize("value", [{1, 2}, object(), lambda: 0, 1j, range(3), {"a": {"b": [print]}}])
def test_what_is_no_plain_value_is_refused(value: Any) -> None:
    with pytest.raises(shardow.errors.InvalidArgumentError, match="no pickles"):
        plain.encode(value, "state")


def test_the_refusal_says_where() -> None:
    with pytest.raises(ValueError, match=r"state\.a\.b\.0 is a builtins\.builtin_function"):
        plain.encode({"a": {"b": [print]}}, "state")


def test_a_list_that_holds_itself_is_refused() -> None:
    value: list[Any] = []
    value.append(value)
    with pytest.raises(ValueError, match="does it hold itself"):
        plain.encode(value, "state")


@pytest.mark.parametrize("tree", [{"$tuple": [], "b": 1}, {"$other": 1}, {"$bytes": "a"}])
def test_what_encode_does_not_write_is_not_read(tree: Any) -> None:
    with pytest.raises(ValueError, match=r"alone|nothing that|base64"):
        plain.decode(tree)
