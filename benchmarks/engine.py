"""Gives this process the extension module of the tests, which is linked from the same objects as the shipped one and
has what benchmarks measure it with besides. Imported before shardow; nothing where shardow is there already."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "python" / "tests"))
from core_modules import HOOKS

if "shardow" not in sys.modules:
    HOOKS.install()
