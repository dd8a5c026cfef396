#!/usr/bin/env python3
"""Counts code lines and files of each folder and compares them with tools/code_lines.txt.

Code lines are counted by `cloc`: neither blank lines nor comments. Folders that grow fail the check; `--write` records
the new numbers, and the commit says in a sentence why they grew.
"""

import csv
import pathlib
import re
import subprocess
import sys

TABLE = pathlib.Path(__file__).with_name("code_lines.txt")
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


def measured() -> tuple[dict[str, tuple[int, int]], dict[str, tuple[int, int]]]:
    """Returns (code lines, files) of each folder and of each part."""
    listed = subprocess.run(["git", "ls-files"], capture_output=True, text=True, check=True).stdout.splitlines()
    paths = [path for path in listed if not FIXTURE.search(path) and pathlib.Path(path).is_file()]
    lines = count(paths)
    folders: dict[str, tuple[int, int]] = {}
    parts: dict[str, tuple[int, int]] = {}
    for path in paths:
        for table, key in ((folders, folder_of(path)), (parts, part_of(path)), (parts, "all files")):
            total, files = table.get(key, (0, 0))
            table[key] = (total + lines.get(path, 0), files + 1)
    return folders, parts


def main() -> int:
    """Prints the tables; fails where a folder has more lines or files than recorded."""
    folders, parts = measured()
    for name, (lines, files) in [*sorted(folders.items()), ("--", (0, 0)), *sorted(parts.items())]:
        print(f"{lines:8,} {files:5} {name}" if name != "--" else "-" * 40)
    if "--write" in sys.argv:
        TABLE.write_text("".join(f"{lines} {files} {name}\n" for name, (lines, files) in sorted(folders.items())))
        return 0
    rows = [line.split(" ", 2) for line in TABLE.read_text().splitlines()]
    recorded = {name: (int(lines), int(files)) for lines, files, name in rows}
    failed = False
    for name, (lines, files) in sorted(folders.items()):
        old_lines, old_files = recorded.get(name, (0, 0))
        if lines > old_lines or files > old_files:
            failed = True
            print(f"{name}: {lines} code lines in {files} files, recorded are {old_lines} in {old_files}.")
    if failed:
        print("Take something out, or record it (python3 tools/code_lines.py --write) and say why in the commit.")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
