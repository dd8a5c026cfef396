"""The averages as a nested dict, and back: what state_dict, load_state_dict and distance are made of."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from shardow.averages.tracked import Tracked
from shardow.base.checks import invalid
from shardow.distributed import gather
from shardow.distributed.rank_group import Combined, RankGroup
from shardow.model.dtensor import region_of
from shardow.model.match import Fit, compare
from shardow.model.piece import Piece

HINT = "strict=False takes what there is"

_CHUNK = 1 << 20  # elements of a temporary

Copy = Callable[[], object]  # fills a part of the averages


def as_tensor(one: Tracked, k: int) -> torch.Tensor:
    if one.is_whole:
        return one.averages[k].view(tuple(one.region.shape))
    return Piece(one.averages[k], one.region)


def engine_state(state: Mapping[str, Any]) -> str:
    text = state.get("state")
    if not isinstance(text, str):
        raise invalid("this is no state of shardow.EMA: no 'state'; it has " + ", ".join(map(repr, list(state)[:8])))
    return text


def check(
    what: str, state: Mapping[str, Any], parts: Sequence[Sequence[gather.Part]], keys: Sequence[str],
    strict: bool = True,
) -> tuple[list[Copy], dict[str, list[str]]]:  # fmt: skip
    """Returns what load_state_dict will copy into ``parts``, of each average, and the names that are missing and
    unexpected. Raises with everything that does not fit, before anything is copied; unless ``strict``, names may
    lack."""
    averages = state.get("averages")
    if not isinstance(averages, Mapping):
        raise invalid("this is not a state of shardow.EMA: 'averages' is missing")
    by_key = {keys[0]: averages} if len(keys) == 1 else averages
    problems = [
        f"no averages for decay {key} (there are {', '.join(map(str, averages))})"
        for key in keys
        if not isinstance(by_key.get(key), Mapping)
    ]
    if problems:
        raise invalid(f"the state does not fit: {'; '.join(problems)}")
    shapes = {part.name: tuple(part.region.shape) for part in parts[0]}
    fits = [
        compare(shapes, {name: tuple(value.size()) if name in shapes else () for name, value in by_key[key].items()})
        for key in keys
    ]
    each = zip(parts, keys, fits, strict=True)
    copies = [copy for own, key, fit in each for copy in copies_of(own, by_key[key], fit)]
    joined = fits[0].joined(fits[1:])
    if not strict:
        other = [name for name, *_ in joined.different]
        joined.missing += other
        joined.unexpected += [joined.keys[name] for name in other]
        replace(joined.only_different(), different=[]).refuse(what, "the state")
    else:
        joined.refuse(what, "the state", hint=HINT)
    return copies, {"missing": joined.missing, "unexpected": joined.unexpected}


def copies_of(parts: Iterable[gather.Part], state: Mapping[str, Any], fit: Fit[Any]) -> list[Copy]:
    """Returns how the values of ``state`` that fit get into ``parts``; they are what slices like a tensor. A value that
    is another part makes an entry of ``fit.elsewhere``."""
    wrong = {name for name, *_ in fit.different}
    copies: list[Copy] = []
    for part in parts:
        if part.name not in fit.keys or part.name in wrong:
            continue
        value = state[fit.keys[part.name]]
        if isinstance(value, Piece):
            region, local = value.region, value.local
        elif hasattr(value, "_local_tensor"):
            region, local = region_of(part.name, value), value._local_tensor
        else:
            copies.append(partial(gather.take, value, part.region, part.flat))
            continue
        if region == part.region:
            copies.append(partial(part.flat.copy_, local.reshape(-1)))
        else:
            fit.elsewhere.append(part.name)
    return copies


def options_in(engine_state: str) -> str:
    """What is in force beside the decays: the rule, and all that is not as it usually is."""
    state = json.loads(engine_state)
    unusual = {"rounding": "auto", "dtype": "F32", "update_every": 1, "start_step": 0, "seed": "0"}
    return ", ".join(f"{name}={state[name]}" for name in ("rule", *unusual) if state[name] != unusual.get(name))


def squares(tracked: Sequence[Tracked], k: int, ranks: RankGroup) -> Combined:
    """Returns what makes |average - weights| / |weights| of all ranks' squares, as text; every element counted on one
    rank, by its owner."""
    apart, length = 0.0, 0.0
    for one in tracked:
        if not _owned(one, ranks):
            continue
        for average, weight in zip(one.averages[k].split(_CHUNK), one.sources().split(_CHUNK), strict=True):
            weight = weight.to(average.device).double()
            apart += float((average.double() - weight).square().sum())
            length += float(weight.square().sum())

    def ratio(texts: list[bytes]) -> bytes:
        apart, length = (math.fsum(squares) for squares in zip(*map(json.loads, texts), strict=True))
        return repr(math.sqrt(apart / length) if length > 0 else 0.0).encode()

    return Combined(json.dumps([apart, length]).encode(), ratio)


def _owned(one: Tracked, ranks: RankGroup) -> bool:
    """False for what another rank counts: copies on all replicas but the first, and whole tensors that every rank
    holds.
    """
    divided = one.stretched or one.region.size < one.local.region.size
    copied = not divided and any(index > 0 for _, index, _ in one.local.replicas)
    return one.local.counts_on(ranks.rank) and not copied
