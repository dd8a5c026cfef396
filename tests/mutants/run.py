"""Plants each mistake of the tables beside this file, runs the tests nearest to it, and prints which were noticed.

A table has one entry for each mistake: ``file``, ``old`` (text that is once in that file), ``new``, ``what`` (the
mistake in a sentence), ``tests``: "PROGRAM FILTER" for a C++ program, else arguments of pytest. ``equivalent`` says
why no test can notice a mistake; it is not run. Mistakes are planted in copies of the tree below build/mutants: the
engine's, compiled at -O0, and Python's, over the extension of build/release. A result is kept by the hash of the entry,
its file and its tests; ``rm -r build/mutants/results`` forgets all.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import filecmp
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import tomllib

ROOT = Path(__file__).parents[2]
BUILD = ROOT / "build" / "mutants"
BAR = 0.95
DEADLINE = 240.0  # seconds that the tests of one mistake take at most: a mistake may make them stand still


@dataclasses.dataclass(frozen=True)
class Mutant:
    table: str
    file: str
    old: str
    new: str
    what: str
    tests: tuple[str, ...]
    equivalent: str = ""

    @property
    def is_of_engine(self) -> bool:
        return self.file.startswith(("src/", "include/", "python/src/"))

    @property
    def programs(self) -> list[tuple[str, str]]:
        """Returns the C++ programs and their filters."""
        parts = [test.partition(" ") for test in self.tests]
        return [(program, filter) for program, _, filter in parts if program.endswith("_test")]

    @property
    def of_python(self) -> list[str]:
        return [test for test in self.tests if test.partition(" ")[0] not in dict(self.programs)]

    def problem(self) -> str:
        """Returns what is wrong with the entry, or nothing."""
        path = ROOT / self.file
        times = path.read_text().count(self.old) if path.is_file() else 0
        if times != 1:
            return (
                f"{self.table}: {times} times in {self.file}, not once: {self.old!r}. Plant {self.what!r} in what came "
                "in its place, or strike it and say why"
            )
        missing = [test for test in self.of_python if not (ROOT / test.partition("::")[0]).exists()]
        return f"{self.table}: no {', '.join(missing)}, which tests {self.what!r}" if missing else ""

    def digest(self) -> str:
        """Returns the name of its result: the mistake, its file and the tests' files."""
        paths = [ROOT / self.file, *(ROOT / test.partition("::")[0] for test in self.of_python)]
        for program, _ in self.programs:
            name = program.removesuffix("_test")
            own = {ROOT / "tests" / name, ROOT / "tests" / name.partition("_")[0]}  # cuda_calls_test is in tests/cuda
            sources = [path for folder in own for path in folder.glob("*.cc")]
            paths += sorted([*(ROOT / "src" / name).glob("*_test.cc"), *sources])
        for folder in [path for path in paths if path.is_dir()]:
            paths += sorted(folder.rglob("*.py"))
        digest = hashlib.sha256(repr(dataclasses.astuple(self)).encode())
        for path in paths:
            digest.update(path.read_bytes() if path.is_file() else b"")
        return digest.hexdigest()[:24]


def tables() -> list[Mutant]:
    """Returns the entries of all tables, in their order."""
    entries = []
    for path in sorted(Path(__file__).parent.glob("*.toml")):
        for entry in tomllib.loads(path.read_text()).get("mutant", []):
            entries.append(Mutant(table=path.stem, **{**entry, "tests": tuple(entry.get("tests", ()))}))
    return entries


class Tree:
    """A copy of the tree, in which one mistake at a time is planted."""

    def __init__(self, name: str) -> None:
        self.root = BUILD / name
        self.python = self.root / ".venv" / "bin" / "python"
        self.folder_of_build = self.root / "build" / "release"
        self.last_failure = BUILD / f"last-failure-{name}.txt"

    def make(self) -> None:
        """Copies what differs, so that what did not change is not compiled again."""
        command = ["git", "-C", str(ROOT), "ls-files", "-co", "--exclude-standard", "-z"]
        paths = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split("\0")
        for path in [path for path in paths if path and (ROOT / path).is_file()]:
            copy = self.root / path
            if not copy.is_file() or not filecmp.cmp(ROOT / path, copy, shallow=False):
                copy.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(ROOT / path, copy)
                shutil.copymode(ROOT / path, copy)
        for copy in [copy for folder in ("src", "include", "tests") for copy in (self.root / folder).rglob("*.*")]:
            if not (ROOT / copy.relative_to(self.root)).exists():
                copy.unlink()  # it went, and would be compiled beside what took its place
        if not self.python.exists():
            subprocess.run([sys.executable, "-m", "venv", "--without-pip", self.root / ".venv"], check=True)
        # Only paths: .venv's own .pth file would put the tree that it is installed from in front.
        ours = next((self.root / ".venv" / "lib").glob("python3*/site-packages"))
        packages = next(path for path in map(Path, sys.path) if path.name == "site-packages")
        (ours / "paths.pth").write_text(f"{self.root / 'python'}\n{packages}\n")

    def link_extension(self) -> None:
        module = next(self.folder_of_build.glob("_core*.so"), None)
        if module is None:
            return  # no test of Python's was asked for
        link = self.root / "python" / "shardow" / module.name
        link.unlink(missing_ok=True)
        link.symlink_to(module.resolve())

    def prepare(self, mutants: Sequence[Mutant]) -> None:
        """Makes what all of these mistakes need. For Python's: the extension as it was built for the tests."""
        self.make()
        self.folder_of_build.parent.mkdir(exist_ok=True)
        if not self.folder_of_build.is_symlink():
            self.folder_of_build.symlink_to(ROOT / "build" / "release")
        self.link_extension()

    def build(self, mutants: Sequence[Mutant]) -> None:
        """Compiles what the tests of these mistakes use; nothing of Python's."""

    @contextlib.contextmanager
    def planted(self, mutant: Mutant) -> Iterator[None]:
        path = self.root / mutant.file
        text = path.read_text()
        path.write_text(text.replace(mutant.old, mutant.new))
        try:
            yield
        finally:
            path.write_text(text)

    def run(self, mutants: Sequence[Mutant], deadline: float) -> str:
        """Runs the tests of these mistakes; returns who failed, or nothing."""
        filters: dict[str, list[str]] = {}
        for program, filter in [pair for mutant in mutants for pair in mutant.programs]:
            filters.setdefault(program, []).append(filter or "*")
        commands = [
            [
                str(self.folder_of_build / program),
                "--gtest_brief=1",
                "--gtest_fail_fast",
                f"--gtest_filter={':'.join(dict.fromkeys(names))}",
            ]
            for program, names in filters.items()
        ]
        arguments = dict.fromkeys(test for mutant in mutants for test in mutant.of_python)
        if arguments:
            commands.append([str(self.python), "-m", "pytest", "-x", "-rfE", "-p", "no:cacheprovider", *arguments])
        return next((failed for command in commands if (failed := self._failed(command, deadline))), "")

    def _failed(self, command: list[str], deadline: float) -> str:
        with tempfile.TemporaryDirectory(prefix="mutant", ignore_cleanup_errors=True) as folder:
            on_device = Path(command[0]).name.startswith(("cuda_", "kernels_"))
            fake = self.folder_of_build / "fake" if on_device else ""
            environment = {**os.environ, "TMPDIR": folder, "TEST_TMPDIR": folder, "LD_LIBRARY_PATH": str(fake)}
            with open(Path(folder) / "output", "w+", errors="replace") as output:
                process = subprocess.Popen(
                    command, cwd=self.root, env=environment, stdout=output, stderr=output, start_new_session=True
                )
                try:
                    code = process.wait(deadline)
                except subprocess.TimeoutExpired:
                    code = None
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
                output.seek(0)
                text = output.read()
        if code == 0:
            return ""
        if code is not None and "pytest" in command and code != 1 and code > 0:
            raise SystemExit(f"pytest ended with {code}:\n{text[-3000:]}")
        failures = [line for line in text.splitlines() if line.startswith(("FAILED", "ERROR", "[  FAILED  ]"))]
        ended = f"{Path(command[0]).name} " + ("stood still" if code is None else f"ended with {code}")
        self.last_failure.write_text(text)
        return failures[0][:150] if failures else ended


class EngineTree(Tree):
    """The engine's, which is compiled in it."""

    def prepare(self, mutants: Sequence[Mutant]) -> None:
        self.make()
        ccache = shutil.which("ccache")
        launcher = [f"-DCMAKE_CXX_COMPILER_LAUNCHER={ccache}"] if ccache else []
        options = ["-DCMAKE_BUILD_TYPE=Debug", "-DCMAKE_CXX_FLAGS_DEBUG=-O0", "-DSHARDOW_PYTHON=ON", *launcher]
        options.append(f"-DPython_EXECUTABLE={self.python}")
        self._cmake("-S", self.root, "-B", self.folder_of_build, "-G", "Ninja", *options)
        self.build(mutants)
        self.link_extension()

    def build(self, mutants: Sequence[Mutant]) -> None:
        programs = {program for mutant in mutants for program, _ in mutant.programs}
        for_python = {"_core", "_core_hooks", "fake_driver", "fake_nvrtc"}
        modules = for_python if any(mutant.of_python for mutant in mutants) else set()
        self._cmake("--build", self.folder_of_build, "--target", *sorted(programs | modules))

    def _cmake(self, *words: object) -> None:
        command = [str(Path(sys.executable).parent / "cmake"), *map(str, words)]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise SystemExit(f"{' '.join(command)}\n{done.stdout[-3000:]}{done.stderr[-3000:]}")


class Lane(threading.Thread):
    """Runs the mistakes of one tree, one after the other."""

    def __init__(self, tree: Tree, mutants: list[Mutant], results: dict[Mutant, str]) -> None:
        super().__init__()
        self._tree, self._mutants, self._results = tree, mutants, results
        self._digests = {mutant: mutant.digest() for mutant in mutants}  # of the tests that the tree gets
        self.error: BaseException | None = None

    def run(self) -> None:
        try:
            self._work()
        except BaseException as error:  # main() raises it
            self.error = error

    def _work(self) -> None:
        if not self._mutants:
            return
        self._tree.prepare(self._mutants)
        failed = self._tree.run(self._mutants, 3 * DEADLINE)
        if failed:
            raise SystemExit(f"without any mistake: {failed}; {self._tree.last_failure}")
        for mutant in self._mutants:
            began = time.monotonic()
            with self._tree.planted(mutant):
                self._tree.build([mutant])
                failed = self._tree.run([mutant], DEADLINE)
            self._results[mutant] = failed
            (BUILD / "results" / self._digests[mutant]).write_text(json.dumps(failed))
            tell(mutant, failed, f"{time.monotonic() - began:.0f} s")


def tell(mutant: Mutant, failed: str, seconds: str) -> None:
    verdict = f"noticed by {failed}" if failed else "NOT NOTICED"
    print(f"{mutant.table} ({seconds}) {mutant.file}: {mutant.what}\n    {verdict}", flush=True)


def known(mutants: Sequence[Mutant]) -> dict[Mutant, str]:
    """Returns the results of earlier runs."""
    paths = {mutant: BUILD / "results" / mutant.digest() for mutant in mutants}
    return {mutant: json.loads(path.read_text()) for mutant, path in paths.items() if path.is_file()}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="mistakes that have this text in table, file or sentence")
    only = parser.parse_args().only
    mutants = [mutant for mutant in tables() if only in f"{mutant.table} {mutant.file} {mutant.what}"]
    problems = [problem for mutant in mutants if (problem := mutant.problem())]
    if problems:
        raise SystemExit("\n".join(problems))
    (BUILD / "results").mkdir(parents=True, exist_ok=True)
    planted = [mutant for mutant in mutants if not mutant.equivalent]
    results = known(planted)
    for mutant, failed in results.items():
        tell(mutant, failed, "known")
    waiting = [mutant for mutant in planted if mutant not in results]
    lanes = [
        Lane(EngineTree("engine"), [mutant for mutant in waiting if mutant.is_of_engine], results),
        Lane(Tree("python"), [mutant for mutant in waiting if not mutant.is_of_engine], results),
    ]
    for lane in lanes:
        lane.start()
    for lane in lanes:
        lane.join()
        if lane.error:
            raise lane.error
    for table in dict.fromkeys(mutant.table for mutant in mutants):
        noticed = [bool(failed) for mutant, failed in results.items() if mutant.table == table]
        same = sum(mutant.table == table and bool(mutant.equivalent) for mutant in mutants)
        print(f"{table}: {sum(noticed)} noticed of {len(noticed)} planted; {same} equivalent")
    share = sum(map(bool, results.values())) / max(1, len(results))
    print(f"{share:.1%} noticed of {len(results)}, {BAR:.0%} asked")
    return 0 if share >= BAR else 1


if __name__ == "__main__":
    sys.exit(main())
