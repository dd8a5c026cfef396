"""What the command says of itself: docs/cli.md, the man page and completions are made from it by tools/pages.py."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from command import COMMAND, ROOT, run, told

VERBS = re.findall(r"^  ([a-z]+)  ", told("--help").split("Verbs:")[1].split("\n\n")[0], re.MULTILINE)


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pages")
    subprocess.run([sys.executable, ROOT / "tools" / "pages.py", COMMAND, folder], check=True)
    return folder


def test_the_page_is_what_help_says(pages: Path) -> None:
    page = (ROOT / "docs" / "cli.md").read_text()
    assert page == (pages / "cli.md").read_text(), "run: python tools/pages.py build/release/shardow FOLDER"
    for words in ([], *([verb] for verb in VERBS)):
        assert told(*words, "--help") in page


@pytest.mark.parametrize("verb", VERBS)
def test_help_has_examples_that_call_the_verb(verb: str) -> None:
    text = told(verb, "--help")
    examples = re.findall(r"^      \$ (.*)$", text, re.MULTILINE)
    assert any(f"shardow {verb}" in example for example in examples)
    assert max(map(len, text.splitlines())) <= 140


def test_every_exit_status_is_explained_once() -> None:
    table = re.findall(r"^  +(\d+)  ", told("--help"), re.MULTILINE)
    source = (ROOT / "src" / "base" / "errors.cc").read_text()
    assert sorted(map(int, table)) == sorted({0, 1, *map(int, re.findall(r'return \{"\w+", (\d+), "', source))})


@pytest.mark.parametrize("name", ["shardow.1", "shardow.bash", "_shardow", "shardow.fish"])
def test_every_page_names_every_verb_and_option(name: str, pages: Path) -> None:
    text = (pages / name).read_text().replace("\\-", "-")
    for verb in VERBS:
        assert verb in text
        for option in re.findall(r"^  (?:-\w, )?--([\w-]+)", told(verb, "--help"), re.MULTILINE):
            assert option in text


@pytest.mark.parametrize(("shell", "name"), [("bash", "shardow.bash"), ("zsh", "_shardow"), ("fish", "shardow.fish")])
def test_a_completion_is_one_for_its_shell(shell: str, name: str, pages: Path) -> None:
    if shutil.which(shell) is None:
        pytest.skip(f"no {shell}: apt-get install {shell}")
    subprocess.run([shell, "-n", pages / name], check=True)


@pytest.mark.parametrize(
    ("words", "found"),
    [
        (["shardow", "ver"], {"verify"}),
        (["shardow", ""], {*VERBS, "--help", "--version"}),
        (["shardow", "diff", "--wo"], {"--worst"}),
        (["shardow", "average", "--curve", "1"], {"1-sqrt"}),
        (["shardow", "convert", "--max"], {"--max-shard-size"}),
    ],
)
def test_bash_completes(words: list[str], found: set[str], pages: Path) -> None:
    typed = f"COMP_WORDS=({' '.join(map(repr, words))}); COMP_CWORD={len(words) - 1}; _shardow"
    script = f'source {pages}/shardow.bash; {typed}; printf "%s\\n" "${{COMPREPLY[@]}}"'
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=True)
    assert set(done.stdout.split()) == found


def test_the_man_page_is_troff(pages: Path) -> None:
    page = (pages / "shardow.1").read_text()
    assert page.startswith(".TH SHARDOW 1")
    for verb in VERBS:
        assert f".SS shardow {verb}" in page
    if shutil.which("man") is None:
        pytest.skip("no man: apt-get install man-db")
    done = subprocess.run(
        ["man", "--warnings", "-l", pages / "shardow.1"],
        capture_output=True,
        text=True,
        check=True,
        env={"MANWIDTH": "120", "PATH": "/usr/bin:/bin", "LC_ALL": "C.UTF-8"},
    )
    assert done.stderr == ""
    assert "EXIT STATUS" in done.stdout
    assert "--max-shard-size SIZE" in done.stdout


def test_help_takes_a_verb() -> None:
    assert run("help", "inspect").stdout == run("inspect", "--help").stdout
    assert run("help").stdout == run("--help").stdout
    assert "there is no verb 'nothing'" in run("help", "nothing").stderr
