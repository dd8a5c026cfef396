"""Hostile files through every verb of the released build; CTest does all of it with the sanitizers' builds."""

from __future__ import annotations

import os

import hostile
from command import COMMAND


def test_hostile_files_are_refused_by_every_verb() -> None:
    every = 1 if os.environ.get("SHARDOW_ALL") else 7
    assert hostile.main(str(COMMAND), every) > 700 // every
