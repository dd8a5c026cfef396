"""Writes docs/cli.md, the man page and completions for bash, zsh and fish from what the command's --help says:
``python tools/pages.py build/release/shardow FOLDER``. An installation calls it (cmake/command.cmake)."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple


class Option(NamedTuple):
    names: list[str]  # "-o", "--output"; none of a positional
    usage: str  # "-o, --output OUT"
    value: str
    text: str

    @property
    def choices(self) -> list[str]:
        return self.value.split("|") if "|" in self.value else []


class Verb(NamedTuple):
    name: str
    help: str
    description: str
    options: list[Option]
    footer: str


def output_of(command: str, *words: str) -> str:
    return subprocess.run([command, *words], stdout=subprocess.PIPE, text=True, check=True).stdout


def entries(text: str, section: str) -> list[tuple[str, str]]:
    """The lines of a section such as "Options:": what is in front, and its explanation in one line."""
    match = re.search(rf"^{section}:\n((?:  .*\n)+)", text, re.MULTILINE)
    joined = re.sub(r"\n {20,}(?=\S)", "  ", match[1] if match else "")
    return [(front, re.sub(" +", " ", rest)) for front, rest in re.findall(r"^  (\S+(?: \S+)*)  +(.*)$", joined, re.M)]


def option(usage: str, text: str) -> Option:
    names = re.findall(r"(?:^|, )(--?[\w-]+)", usage)
    return Option(names, usage, usage.rpartition(names[-1])[2].strip() if names else "", text)


def verb(command: str, name: str) -> Verb:
    text = output_of(command, name, "--help")
    options = [option(*entry) for section in ("Positionals", "Options") for entry in entries(text, section)]
    return Verb(name, text, text.split("\n\n")[0].replace("\n", " "), options, text[text.index("Examples:") :])


def markdown(top: str, verbs: list[Verb]) -> str:
    page = (
        "# The command `shardow`\n\nThis page is what `--help` says, made by `tools/pages.py`. "
        "`man shardow` says the same.\n\nAn installation brings completions for bash, zsh and fish below its `share/`. "
        "Where a shell does not look there, source the file\n`PREFIX/share/bash-completion/completions/shardow`; "
        f"PREFIX is the virtual environment, or where CMake installs.\n\n```\n{top}```\n"
    )
    return page + "".join(f"\n## shardow {verb.name}\n\n```\n{verb.help}```\n" for verb in verbs)


def troff(text: str) -> str:
    return re.sub(r"^([.'])", r"\\&\1", text.replace("\\", "\\e").replace("-", "\\-"), flags=re.MULTILINE)


def man(top: str, verbs: list[Verb], version: str) -> str:
    description = troff(top.split("\n\n")[0])
    page = f'.TH SHARDOW 1 "" "{version}"\n.SH NAME\nshardow \\- {description}\n'
    page += f".SH SYNOPSIS\n.B shardow\nVERB ...\n.SH DESCRIPTION\n{description}\n.SH VERBS\n"
    for verb in verbs:
        page += f".SS shardow {verb.name}\n{troff(verb.description)}\n"
        page += "".join(f".TP\n.B {troff(option.usage)}\n{troff(option.text)}\n" for option in verb.options)
        page += f".PP\n.nf\n{troff(verb.footer)}.fi\n"
    return page + f'.SH "EXIT STATUS"\n.nf\n{troff(top.split("Exit status:")[1].lstrip(chr(10)))}.fi\n'


def bash(verbs: list[Verb]) -> str:
    lines = ["_shardow() {", "  local word=${COMP_WORDS[COMP_CWORD]} before=${COMP_WORDS[COMP_CWORD-1]} words="]
    names = " ".join(verb.name for verb in verbs)
    lines += [
        f'  if [ "$COMP_CWORD" -eq 1 ]; then COMPREPLY=($(compgen -W \'{names} --help --version\' -- "$word")); '
        "return; fi",
        '  case "${COMP_WORDS[1]} $before" in',
    ]
    for verb in verbs:
        for option in (option for option in verb.options if option.choices):
            lines += [f"    '{verb.name} {name}') words='{' '.join(option.choices)}' ;;" for name in option.names]
    lines += ['    *) [[ $word == -* ]] && case "${COMP_WORDS[1]}" in']
    for verb in verbs:
        words = " ".join(name for option in verb.options for name in option.names)
        lines += [f"      {verb.name}) words='{words}' ;;"]
    lines += ["    esac ;;", "  esac", '  COMPREPLY=($(compgen -W "$words" -- "$word"))', "}"]
    return "\n".join([*lines, "complete -o default -F _shardow shardow", ""])


def quoted(text: str) -> str:
    return "'" + text.replace("'", "'\\''") + "'"


def zsh(verbs: list[Verb]) -> str:
    def escaped(text: str) -> str:
        return re.sub(r"([:\[\]])", r"\\\1", text)

    lines = ["#compdef shardow", "_shardow() {", "  local -a verbs", "  verbs=("]
    lines += [f"    {quoted(verb.name + ':' + escaped(verb.description))}" for verb in verbs]
    lines += ["  )", "  if (( CURRENT == 2 )); then _describe verb verbs; return; fi"]
    lines += ["  local verb=$words[2]", "  shift words; (( CURRENT-- ))", "  case $verb in"]
    for verb in verbs:
        line = f"    {verb.name}) _arguments -s"
        for option in verb.options:
            values = f":value:({' '.join(option.choices)})" if option.choices else ":value:_files"
            for name in option.names:
                line += " \\\n      " + quoted(f"*{name}[{escaped(option.text)}]{values if option.value else ''}")
        lines += [line + " \\\n      '*:file:_files' ;;"]
    lines += ["  esac", "}"]
    return "\n".join(
        [*lines, 'if [ "$funcstack[1]" = _shardow ]; then _shardow "$@"; else compdef _shardow shardow; fi', ""]
    )


def fish(verbs: list[Verb]) -> str:
    lines = []
    for verb in verbs:
        lines += [
            f"complete -c shardow -n __fish_use_subcommand -f -a {verb.name} -d {quoted(verb.description)}",
        ]
        for option in (option for option in verb.options if option.names):
            line = f"complete -c shardow -n '__fish_seen_subcommand_from {verb.name}'"
            line += "".join(f" -l {name[2:]}" if name[1] == "-" else f" -s {name[1:]}" for name in option.names)
            if option.value:
                line += f" -x -a '{' '.join(option.choices)}'" if option.choices else " -r"
            lines += [f"{line} -d {quoted(option.text)}"]
    return "\n".join([*lines, ""])


def main(command: str, folder: str) -> None:
    top = output_of(command, "--help")
    verbs = [verb(command, name) for name, _ in entries(top, "Verbs")]
    pages = {
        "cli.md": markdown(top, verbs),
        "shardow.1": man(top, verbs, output_of(command, "--version").strip()),
        "shardow.bash": bash(verbs),
        "_shardow": zsh(verbs),
        "shardow.fish": fish(verbs),
    }
    Path(folder).mkdir(parents=True, exist_ok=True)
    for name, text in pages.items():
        (Path(folder) / name).write_text(text)


if __name__ == "__main__":
    main(*sys.argv[1:])
