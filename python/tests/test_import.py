"""`import shardow` is quick, pulls in neither torch nor CUDA, and its public surface is what we say it is."""

from __future__ import annotations

import subprocess
import sys

import pytest

import shardow

SURFACE = sorted(
    ["EMA", "Checkpoint", "Error", "Handle", "SaveHandle", "Schedule", "Slice", "__version__", "async_save", "compat", "errors",
     "full_state_dict", "load", "materialize", "memory", "meta_init", "save", "schedules", "to_empty", "wrap"]
)  # fmt: skip


def test_public_surface_is_frozen() -> None:
    assert sorted(shardow.__all__) == SURFACE
    assert [name for name in dir(shardow) if not name.startswith("_") or name == "__version__"] == sorted(
        [*SURFACE, "open"]
    )  # not in __all__


def test_the_surface_of_memory_is_frozen() -> None:
    assert shardow.memory.__all__ == ["Colours", "Timeline", "Usage", "apply", "draw", "figure", "measure", "plan", "timeline"]
    assert all(getattr(shardow.memory, name).__doc__ for name in shardow.memory.__all__)


def test_every_public_name_has_a_docstring() -> None:
    for name in SURFACE:
        assert name == "__version__" or getattr(shardow, name).__doc__, name
    for name, member in vars(shardow.EMA).items():
        assert name.startswith("_") or member.__doc__, name


@pytest.mark.parametrize("module", ["torch", "numpy", "safetensors"])
def test_import_leaves_heavy_modules_out(module: str) -> None:
    code = f"import shardow, sys; sys.exit({module!r} in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_without_torch_ema_says_what_is_missing() -> None:
    code = "import sys; sys.modules['torch'] = None\nimport shardow\ntry:\n    shardow.EMA\nexcept ImportError as e:\n    print(e)"
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert "pip install torch" in done.stdout


@pytest.mark.parametrize(
    "body", ["import shardow", "import shardow, torch; m = torch.nn.Linear(1500, 1500); e = shardow.EMA(m, threads=2); e.update()"]
)
def test_programs_end_cleanly(body: str) -> None:
    for _ in range(3):
        done = subprocess.run([sys.executable, "-W", "error", "-c", body], check=False, capture_output=True, text=True)
        assert (done.returncode, done.stderr) == (0, "")
