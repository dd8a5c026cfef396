"""What a wheel says of itself, and what a release is made by."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

import shardow

if sys.version_info >= (3, 11):
    import tomllib
else:
    pytest.skip("tomllib is Python 3.11's", allow_module_level=True)

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tools/wheel"))
import links  # noqa: E402

BASE = "https://example.org/owner/name/blob/v1.2.3"


def project(root: Path = ROOT) -> dict[str, Any]:
    return tomllib.loads((root / "pyproject.toml").read_text())["project"]


def test_one_version() -> None:
    """In the metadata, in the package and in CMake."""
    of_cmake = re.search(r"project\(shardow VERSION (\S+)", (ROOT / "CMakeLists.txt").read_text())
    assert of_cmake
    assert {project()["version"], shardow.__version__, of_cmake[1]} == {shardow.__version__}


def test_classifiers_name_every_python_that_is_supported() -> None:
    named = {
        tuple(map(int, one.split(" :: ")[-1].split(".")))
        for one in project()["classifiers"]
        if re.search(r"Python :: 3\.\d+$", one)
    }
    oldest = tuple(map(int, project()["requires-python"].removeprefix(">=").split(".")))
    assert min(named) == oldest
    assert named == {(3, minor) for minor in range(oldest[1], max(named)[1] + 1)}


def test_links_of_a_released_page(tmp_path: Path) -> None:
    for name in ("README.md", "pyproject.toml"):
        shutil.copy(ROOT / name, tmp_path)
    links.main(BASE, tmp_path)
    page = (tmp_path / "README.md").read_text()
    found = re.findall(r"\]\(([^)#\s]+)", page)
    assert found
    for link in found:
        assert link.startswith("https://")
        if link.startswith("https://example.org/"):
            assert (ROOT / re.sub(r"^.*/(blob|raw)/v1\.2\.3/", "", link)).exists(), link
    assert "/raw/v1.2.3/docs/pictures/" in page
    urls = project(tmp_path)["urls"]
    assert urls["Source"] == "https://example.org/owner/name"
    assert (ROOT / urls["Documentation"].removeprefix(f"{BASE}/")).exists()
    with pytest.raises(SystemExit, match="has addresses already"):
        links.main(BASE, tmp_path)


def test_an_address_that_is_none_changes_nothing(tmp_path: Path) -> None:
    shutil.copy(ROOT / "README.md", tmp_path)
    with pytest.raises(SystemExit, match="is no address of a version's files"):
        links.main("https://example.org/owner/name", tmp_path)
    assert (tmp_path / "README.md").read_bytes() == (ROOT / "README.md").read_bytes()


def test_the_release_names_no_secret_and_calls_what_is_there() -> None:
    text = (ROOT / ".github/workflows/release.yml").read_text()
    assert not re.search(r"secrets?\b|password|token:(?! write)", text, re.IGNORECASE)
    jobs = yaml.safe_load(text)["jobs"]
    commands = "\n".join(step.get("run", "") for job in jobs.values() for step in job["steps"])
    targets = set(re.findall(r"^([a-z-]+):.*##", (ROOT / "Makefile").read_text(), re.MULTILINE))
    called = set(re.findall(r"^make ([a-z-]+)", commands, re.MULTILINE))
    assert {"wheel", "wheel-test"} <= called <= targets
    assert all((ROOT / path).exists() for path in re.findall(r"\btools/[\w./-]+", commands))
    assert [name for name, job in jobs.items() if "id-token" in str(job.get("permissions"))] == ["publish"]


def test_the_command_lies_where_pip_puts_programs() -> None:
    """With its man page and completions, where shells and man look beside it."""
    environment = Path(sys.executable).parent
    told = subprocess.run([environment / "shardow", "--version"], capture_output=True, text=True, check=True).stdout
    assert told.strip() == f"shardow {project()['version']}"
    share = environment.parent / "share"
    completions = [
        "bash-completion/completions/shardow",
        "zsh/site-functions/_shardow",
        "fish/vendor_completions.d/shardow.fish",
    ]
    for page in ["man/man1/shardow.1", *completions]:
        assert "verify" in (share / page).read_text(), page
