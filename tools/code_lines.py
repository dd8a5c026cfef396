#!/usr/bin/env python3
"""Counts code lines and files of each folder and compares them with tools/folders.txt, which has what
tools/lint_words.py counts, too.

Code lines are counted by `cloc`: neither blank lines nor comments. Folders that grow fail the check; `--write` records
the new numbers, and the commit says in a sentence why they grew.
"""

import csv
import pathlib
import re
import subprocess
import sys
from collections import Counter

TABLE = pathlib.Path(__file__).with_name("folders.txt")
TEST = re.compile(r"(^|/)tests/|_test\.|(^|/)test_|_fixture|_bench\.|_fuzz|disk_model|test_data")
FIXTURE = re.compile(r"(^|/)fixtures/|(^|/)mutants/")
PARTS = {
    "python/shardow": "python/shardow",
    "src": "engine",
    "include": "engine",
    "python/src": "engine",
    "benchmarks": "benchmarks, examples, tools",
    "examples": "benchmarks, examples, tools",
    "tools": "benchmarks, examples, tools",
}


def folder_of(path: str) -> str:
    """Returns the folder that a path is counted in: two levels, three below python/shardow and python/tests."""
    parts = path.split("/")[:-1]
    return "/".join(parts[: 3 if parts[:1] == ["python"] else 2]) or "."


def part_of(path: str) -> str:
    """Returns the row of the summary: tests, or a part of the product."""
    if TEST.search(path):
        return "tests"
    return next((part for prefix, part in PARTS.items() if path.startswith(prefix + "/")), "the rest")


def count(paths: list[str]) -> dict[str, int]:
    """Returns the code lines of each file that cloc knows."""
    command = ["cloc", "--list-file=-", "--by-file", "--csv", "--quiet", "--skip-uniqueness"]
    output = subprocess.run(command, input="\n".join(paths), capture_output=True, text=True, check=True).stdout
    rows = csv.reader(line for line in output.splitlines() if "," in line)
    return {row[1].removeprefix("./"): int(row[4]) for row in rows if row[4].isdigit() and row[0] != "SUM"}


def tracked_files() -> list[str]:
    listed = subprocess.run(["git", "ls-files"], capture_output=True, text=True, check=True).stdout.splitlines()
    return [path for path in listed if pathlib.Path(path).is_file()]


def holds(columns: tuple[str, ...], counts: Counter[tuple[str, str]]) -> bool:
    """Returns whether no count, by folder and column, is above the table's; `--write` puts all into the table."""
    head, *rows = (line.split() for line in TABLE.read_text().splitlines())
    recorded: Counter[tuple[str, str]] = Counter()
    for folder, *numbers in rows:
        recorded.update({(folder, column): int(number) for column, number in zip(head[1:], numbers, strict=True)})
    if "--write" in sys.argv:
        new = counts + Counter({key: number for key, number in recorded.items() if key[1] not in columns})
        folders = sorted({folder for folder, _ in new})
        rows = [[folder, *(str(new[folder, column]) for column in head[1:])] for folder in folders]
        TABLE.write_text("".join(f"{' '.join(row)}\n" for row in [head, *rows]))
        return True
    grown = [key for key in sorted(counts) if counts[key] > recorded[key]]
    for folder, column in grown:
        print(f"{folder}: {column} {counts[folder, column]}, recorded are {recorded[folder, column]}.")
    return not grown


def main() -> int:
    """Prints the tables; fails where a folder has more lines or files than recorded."""
    paths = [path for path in tracked_files() if not FIXTURE.search(path)]
    lines = count(paths)
    folders: Counter[tuple[str, str]] = Counter()
    parts: Counter[tuple[str, str]] = Counter()
    for path in paths:
        for table, key in ((folders, folder_of(path)), (parts, part_of(path)), (parts, "all files")):
            table.update({(key, "lines"): lines.get(path, 0), (key, "files"): 1})
    for table in (folders, parts):
        print("-" * 40)
        for name in sorted({name for name, _ in table}):
            print(f"{table[name, 'lines']:8,} {table[name, 'files']:5} {name}")
    if holds(("lines", "files"), folders):
        return 0
    print("Take something out, or record it (python3 tools/code_lines.py --write) and say why in the commit.")
    return 1


if __name__ == "__main__":
    sys.exit(main())
