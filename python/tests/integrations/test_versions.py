"""The integrations import nothing until used, and say the versions that ran here."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pytest

from shardow import integrations

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize("package", integrations.TESTED_WITH)
def test_the_version_that_is_named_is_the_one_that_is_tested(package: str) -> None:
    try:
        found = version(package)
    except PackageNotFoundError:
        pytest.skip(f"{package} is not installed")
    assert found == integrations.TESTED_WITH[package]
    assert f"{package} {found}" in (ROOT / "docs" / "integrations.md").read_text()
    assert (
        f"{package}=={found}" in "".join(one.read_text() for one in (ROOT / "tools").glob("requirements*.txt")).split()
    )


def test_nothing_is_imported_before_it_is_used() -> None:
    frameworks = {one.partition("-")[0] for one in integrations.TESTED_WITH}
    program = f"import sys, shardow.integrations; print({ {'torch', *frameworks} } & {{*sys.modules}})"
    assert (
        subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout == "set()\n"
    )


def test_every_framework_has_a_module() -> None:
    modules = {one.stem for one in Path(integrations.__file__).parent.glob("[!_]*.py")} - {"common"}
    assert (
        modules
        == {one.partition("-")[0] for one in integrations.TESTED_WITH}
        == {*integrations.__all__} - {"TESTED_WITH"}
    )
