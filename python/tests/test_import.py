"""`import shardow` is quick, pulls in neither torch nor CUDA, and its public surface is what we say it is."""

from __future__ import annotations

import inspect
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import shardow

SURFACE = sorted(
    ["EMA", "Checkpoint", "Checkpoints", "Error", "Handle", "SaveHandle", "Schedule", "Slice", "__version__",
     "async_save", "compat",
     "errors", "full_state_dict", "load", "materialize", "memory", "merge", "merged", "meta_init", "posthoc", "save",
     "schedules",
     "to_empty", "wrap"]
)  # fmt: skip


def test_public_surface_is_frozen() -> None:
    assert sorted(shardow.__all__) == SURFACE
    # `open` is not in __all__.
    assert [name for name in dir(shardow) if not name.startswith("_") or name == "__version__"] == sorted(
        [*SURFACE, "open"]
    )


def test_the_surface_of_memory_is_frozen() -> None:
    assert shardow.memory.__all__ == [
        "Switches",
        "Timeline",
        "Usage",
        "apply",
        "draw",
        "figure",
        "measure",
        "plan",
        "timeline",
    ]
    assert all(getattr(shardow.memory, name).__doc__ for name in shardow.memory.__all__)


@pytest.mark.parametrize("module", ["errors", "schedules", "memory", "compat"])
def test_dir_shows_what_is_public_and_no_more(module: str) -> None:
    found = getattr(shardow, module)
    assert dir(found) == sorted(found.__all__)


def test_every_surface_is_shown() -> None:
    here = Path(shardow.compat.__file__).parent
    homes = {one.stem for one in here.glob("[a-z]*.py")} | {one.parent.name for one in here.glob("*/__init__.py")}
    assert sorted(shardow.compat.__all__) == sorted(homes - {"_impl", "files"})


def test_classes_that_calls_return_have_public_names(tmp_path: Path) -> None:
    import torch

    model = torch.nn.Linear(2, 2)
    ema = shardow.EMA(model)
    with (
        ema.attach(torch.optim.SGD(model.parameters())) as handle,
        shardow.memory.apply(model, activation_checkpointing=False) as switches,
    ):
        assert (type(handle), type(switches)) == (shardow.Handle, shardow.memory.Switches)
    saving = ema.async_save(tmp_path / "a.safetensors")
    saving.wait()
    opened = shardow.open(tmp_path / "a.safetensors")
    assert (type(saving), type(opened), type(opened.get_slice("weight"))) == (
        shardow.SaveHandle,
        shardow.Checkpoint,
        shardow.Slice,
    )
    with pytest.raises(shardow.errors.NotFoundError):
        shardow.open(tmp_path / "b.safetensors")


def _public_functions() -> list[Any]:
    homes = [shardow, shardow.memory, shardow.schedules]
    found = [getattr(home, name) for home in homes for name in home.__all__]
    methods = [
        member
        for cls in (shardow.EMA, shardow.Checkpoint)
        for name, member in vars(cls).items()
        if not name.startswith("_")
    ]
    return [one for one in [*found, *methods, shardow.open, shardow.EMA.__init__] if inspect.isfunction(one)]


@pytest.mark.parametrize("function", _public_functions(), ids=lambda one: one.__qualname__)
def test_options_after_the_first_two_are_named(function: Any) -> None:
    parameters = inspect.signature(function).parameters.values()
    assert sum(one.kind is one.POSITIONAL_OR_KEYWORD and one.default is not one.empty for one in parameters) <= 2
    assert not any(one.kind is one.VAR_KEYWORD for one in parameters)


@pytest.mark.skipif(not os.environ.get("SHARDOW_ALL"), reason="mypy reads torch for most of a minute: SHARDOW_ALL=1")
def test_type_checkers_know_every_name(tmp_path: Path) -> None:
    """Of the package itself: no __getattr__ and no **options hide a wrong name or word from them."""
    api = pytest.importorskip("mypy.api")
    program = tmp_path / "program.py"
    program.write_text(
        "import shardow, torch\nm = torch.nn.Linear(1, 1)\nshardow.nothing\nshardow.EMA(m, momentum=0.1)\n"
        "shardow.EMA(m, replicas='all')\nshardow.EMA(m, 0.9, replicas='copy').load('x', options='file')\n"
    )
    told, *_ = api.run([str(program), "--follow-imports=silent", "--cache-dir", str(tmp_path / "cache")])
    assert [f":{line}: error" in told for line in (3, 4, 5, 6)] == [True, True, True, False], told


def test_every_public_name_has_a_docstring() -> None:
    for name in SURFACE:
        assert name == "__version__" or getattr(shardow, name).__doc__, name
    for name, member in vars(shardow.EMA).items():
        assert name.startswith("_") or member.__doc__, name


@pytest.mark.parametrize("module", ["torch", "numpy", "safetensors"])
def test_import_leaves_heavy_modules_out(module: str) -> None:
    code = f"import shardow, sys; sys.exit({module!r} in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize(
    "use",
    [
        "shardow.EMA",
        "shardow.memory.plan",
        "shardow.memory.apply",
        "shardow.compat",
        "from shardow.compat import timm",
        "shardow.posthoc.synthesize('snapshots', 0.1, out='out')",
    ],
)
def test_without_torch_what_needs_it_says_so(use: str) -> None:
    code = (
        "import sys; sys.modules['torch'] = None\nimport shardow\ntry:\n    " + use + "\nexcept ImportError as e:"
        "\n    print(e)"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert "needs PyTorch: pip install torch" in done.stdout


def test_ema_that_lives_to_the_end_of_the_interpreter_says_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Modules' globals are None by then."""
    import torch

    from shardow.averaging import model_averages

    ema = shardow.EMA(torch.nn.Linear(2, 2))
    unraisable: list[object] = []
    with monkeypatch.context() as patch:
        patch.setattr(sys, "unraisablehook", unraisable.append)
        for name in [name for name in vars(model_averages) if not name.startswith("__")]:
            patch.setattr(model_averages, name, None)
        del ema
    assert unraisable == []


@pytest.mark.parametrize(
    "body",
    [
        "import shardow",
        "import shardow, torch; m = torch.nn.Linear(1500, 1500); e = shardow.EMA(m, threads=2); e.update()",
    ],
)
def test_programs_end_cleanly(body: str) -> None:
    for _ in range(3 if os.environ.get("SHARDOW_ALL") else 1):
        done = subprocess.run([sys.executable, "-W", "error", "-c", body], check=False, capture_output=True, text=True)
        assert (done.returncode, done.stderr) == (0, "")


def test_the_package_says_what_it_is() -> None:
    tomllib = pytest.importorskip("tomllib")  # from Python 3.11 on
    root = Path(__file__).parents[2]
    project = tomllib.loads((root / "pyproject.toml").read_text())["project"]
    assert project["version"] == shardow.__version__
    assert project["description"]
    assert project["keywords"] == sorted(project["keywords"], key=str.casefold)
    classifiers = project["classifiers"]
    assert classifiers == list(dict.fromkeys(classifiers))
    for kind in (
        "Development Status",
        "Intended Audience",
        "Operating System",
        "Programming Language",
        "Topic",
        "Typing",
    ):
        assert any(one.startswith(f"{kind} :: ") for one in classifiers), kind
    oldest = "Programming Language :: Python :: " + project["requires-python"].removeprefix(">=")
    assert oldest in classifiers
    assert project["license"] == "Apache-2.0"
    assert not any(one.startswith("License ::") for one in classifiers)
    assert (root / "python" / "shardow" / "py.typed").exists()
