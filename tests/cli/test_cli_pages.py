"""What the command says of itself: docs/cli.md, the man page and completions are made from the description that parses
the words.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest
from command import COMMAND, ROOT, told

VERBS = re.findall(r"^  ([a-z]+)  ", told("--help").split("Verbs:")[1].split("\n\n")[0], re.MULTILINE)


def test_the_page_is_what_help_says() -> None:
    page = (ROOT / "docs" / "cli.md").read_text()
    assert page == told("manual", "markdown"), "made by: build/release/shardow manual markdown > docs/cli.md"
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
    assert sorted(map(int, table)) == sorted(
        {0, 1, *map(int, re.findall(r"return (\d+);\n  ", source.split("exit_code")[1]))}
    )


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_a_completion_is_one_for_its_shell(shell: str, tmp_path: Path) -> None:
    script = tmp_path / "completion"
    script.write_text(told("completion", shell))
    text = script.read_text()
    assert all(verb in text for verb in VERBS)
    assert "max-shard-size" in text
    if shutil.which(shell) is None:
        pytest.skip(f"no {shell}: apt-get install {shell}")
    subprocess.run([shell, "-n", script], check=True)


@pytest.mark.parametrize(
    ("words", "found"),
    [
        (["shardow", "ver"], {"verify"}),
        (["shardow", ""], {*VERBS, "--help", "--version"}),
        (["shardow", "diff", "--wo"], {"--worst"}),
        (["shardow", "completion", ""], {"bash", "fish", "zsh"}),
        (["shardow", "convert", "--max"], {"--max-shard-size"}),
    ],
)
def test_bash_completes(words: list[str], found: set[str]) -> None:
    typed = f"COMP_WORDS=({' '.join(map(repr, words))}); COMP_CWORD={len(words) - 1}; _shardow"
    script = f'source <({COMMAND} completion bash); {typed}; printf "%s\\n" "${{COMPREPLY[@]}}"'
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=True)
    assert set(done.stdout.split()) == found


def test_the_man_page_is_troff(tmp_path: Path) -> None:
    page = told("manual", "man")
    assert page.startswith(".TH SHARDOW 1")
    for verb in VERBS:
        assert f".SS shardow {verb}" in page
    if shutil.which("man") is None:
        pytest.skip("no man: apt-get install man-db")
    (tmp_path / "shardow.1").write_text(page)
    done = subprocess.run(
        ["man", "--warnings", "-l", tmp_path / "shardow.1"],
        capture_output=True,
        text=True,
        check=True,
        env={"MANWIDTH": "120", "PATH": "/usr/bin:/bin", "LC_ALL": "C.UTF-8"},
    )
    assert done.stderr == ""
    assert "EXIT STATUS" in done.stdout
    assert "--max-shard-size SIZE" in done.stdout
