"""The workflows of .github and .ci/run ask for goals that the Makefile has, with versions that stand elsewhere too."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

yaml = pytest.importorskip("yaml", reason="pip install -r tools/requirements.txt")

ROOT = Path(__file__).resolve().parents[1]
WORKFLOWS = sorted((ROOT / ".github/workflows").glob("*.yml"))
GOALS = {*re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)}


def rows_of(matrix: dict[str, Any]) -> list[dict[str, str]]:
    """Returns what each job of a matrix with one list, or with rows to include, is given."""
    named = {key: values for key, values in matrix.items() if key != "include"}
    assert len(named) + ("include" in matrix) <= 1
    return [*matrix.get("include", []), *({key: value} for key, values in named.items() for value in values)]


def commands_of(workflow: dict[str, Any]) -> list[str]:
    """Returns the commands of all steps, with the matrix filled in."""
    commands = []
    for job in workflow["jobs"].values():
        for row in rows_of(job.get("strategy", {}).get("matrix", {})) or [{}]:
            for step in job["steps"]:
                assert ("run" in step) != ("uses" in step), step
                command = step.get("run", "")
                for key, value in row.items():
                    command = command.replace(f"${{{{ matrix.{key} }}}}", str(value))
                assert "matrix." not in command, command
                commands.append(command)
    return commands


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_a_workflow_asks_for_goals_of_the_makefile(path: Path) -> None:
    workflow = yaml.safe_load(path.read_text())
    assert {"name", "permissions", "jobs"} <= {*workflow} <= {"name", "permissions", "jobs", "concurrency", True}
    assert all(job["runs-on"] == "ubuntu-24.04" for job in workflow["jobs"].values())
    commands = commands_of(workflow)
    goals = {goal for command in commands for goal in re.findall(r"^make ([a-z-]+)", command, re.MULTILINE)}
    assert goals
    assert goals <= GOALS
    for script in (word for command in commands for word in re.findall(r"\b(?:tools|tests)/\S+", command)):
        assert (ROOT / script).is_file(), script


def test_what_ci_runs_is_in_the_makefile() -> None:
    goals = re.findall(r"^make ([a-z-]+)$", (ROOT / ".ci/run").read_text(), re.MULTILINE)
    assert {"lint", "test", "docs"} <= {*goals} <= GOALS


def test_the_nightly_has_the_oldest_torch_and_the_one_of_the_requirements() -> None:
    matrix = yaml.safe_load((ROOT / ".github/workflows/nightly.yml").read_text())["jobs"]["torch"]["strategy"]["matrix"]
    versions = [str(row["torch"]) for row in rows_of(matrix)]
    project = (ROOT / "pyproject.toml").read_text()
    oldest = re.search(r'"torch>=([\d.]+)"', project)
    pinned = re.search(r"^torch==([\d.]+)$", (ROOT / "tools/requirements-demo.txt").read_text(), re.MULTILINE)
    assert oldest is not None
    assert pinned is not None
    assert versions == [f"{oldest[1]}.0", pinned[1]]
