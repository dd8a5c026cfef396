"""The ranks that act together, for surfaces whose origins have no word for them."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import nn

from shardow.base.checks import unsupported
from shardow.compat.ways.stand_in import StandIn
from shardow.model.groups import group_of_model
from shardow.model.view import ModelView
from shardow.ranks.team import Team


def team_of(module: nn.Module) -> Team:
    """Those that share a module, or what it stands in for."""
    return module.core.team if isinstance(module, StandIn) else Team(group_of_model(module, None), None)


def unchanged(view: ModelView) -> bool:
    """view.unchanged(), if need be when unsharded copies of the weights are gone."""
    if view.unchanged():
        return True
    view.reshard()
    return view.unchanged()


def refuse_copies(team: Team) -> None:
    """Raises NotImplementedError where a part of the averages is another rank's."""
    if team.process_group is not None:
        raise unsupported(
            f"averages of a model that {team.size} ranks share can't be copied or pickled: each has a part; save() them"
        )


def everybody(process_group: dist.ProcessGroup | None = None) -> Team:
    """Those of ``process_group``; None: all there are, each of which has a plain model, where one file is enough."""
    return Team(dist.group.WORLD if process_group is None and dist.is_initialized() else process_group, None)


def joined(what: str, facts: dict[str, Any], process_group: dist.ProcessGroup | None = None) -> Team:
    """everybody() for a new ``what`` ("DistEMA"): its calls meet its own alone. ValueError where ``facts`` differ.
    Collective.
    """
    team = everybody(process_group)
    team.same(f"{what}(...)", lambda: facts, what)
    return team
