"""Hostile files through every verb of the released build; CTest does all of it with the sanitizers' builds."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from command import COMMAND

HOSTILE = Path(__file__).with_name("hostile.py")


def test_hostile_files_are_refused_by_every_verb() -> None:
    """In a process of its own, since it looks at how much memory any child had."""
    every = 1 if os.environ.get("SHARDOW_ALL") else 7
    done = subprocess.run([sys.executable, HOSTILE, COMMAND, str(every)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout.split()[0]) > 2500 // every
