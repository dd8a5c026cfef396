"""What a wheel must hold to: `python tools/wheel/check.py dist/*.whl` says what is wrong with each, and fails if
anything is.

auditwheel judges what glibc it needs, abi3audit whether it keeps to Python's stable ABI; the rest is read by binutils
and here.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

MOST_BYTES = 4_000_000
LOADERS = {"ld-linux-x86-64.so.2", "ld-linux-aarch64.so.1"}
NEEDED = {"libc.so.6", "libm.so.6", "libstdc++.so.6", "libgcc_s.so.1", "libpthread.so.0", "libdl.so.2"} | LOADERS
EXPORTED = {"PyInit__core"}
LICENSED = {"cli11", "eigen", "fmtlib", "highway", "libisal", "nanobind", "simdjson", "zlib"}


def told(*command: str | Path) -> str:
    done = subprocess.run([str(one) for one in command], capture_output=True, text=True)
    return done.stdout + (done.stderr if done.returncode else "")


def needed(module: Path) -> set[str]:
    return set(re.findall(r"\(NEEDED\).*\[(.*)\]", told("readelf", "-dW", module)))


def exported(module: Path) -> set[str]:
    return set(told("nm", "-D", "--defined-only", "--format=just-symbols", module).split())


def unresolved(module: Path) -> set[str]:
    """What no library is named for, and Python hasn't."""
    lines = told("nm", "-D", "--undefined-only", module).splitlines()
    return {line.split()[1] for line in lines if re.match(r"\s+U (?!_?Py)[^@]+$", line)}


def faults_elsewhere(program: Path) -> list[str]:
    """What of a built module or program would not run on another machine."""
    faults = []
    if foreign := needed(program) - NEEDED:
        faults.append(f"needs {', '.join(sorted(foreign))}")
    if re.search(r"\((RPATH|RUNPATH|TEXTREL)\)", told("readelf", "-dW", program)):
        faults.append("has a path of the machine that built it, or relocations in its code")
    return faults


def module_faults(module: Path) -> list[str]:
    """The same of a module, and what would be in the way of others."""
    faults = faults_elsewhere(module)
    if extra := exported(module) - EXPORTED:
        faults.append(f"exports {len(extra)} symbols besides PyInit__core, {min(extra)} among them")
    if lost := unresolved(module):
        faults.append(f"leaves {', '.join(sorted(lost))} to be found by chance")
    return faults


def wheel_faults(wheel: Path, tools: Path) -> list[str]:
    faults = []
    if wheel.stat().st_size > MOST_BYTES:
        faults.append(f"has {wheel.stat().st_size:,} bytes, more than {MOST_BYTES:,}")
    platform = wheel.stem.split("-")[-1]
    with zipfile.ZipFile(wheel) as opened, tempfile.TemporaryDirectory() as folder:
        modules = [name for name in opened.namelist() if ".so" in name]
        if len(modules) != 1:
            faults.append(f"has {len(modules)} modules, not one: {', '.join(modules)}")
        for name in modules:
            faults += module_faults(Path(opened.extract(name, folder)))
        commands = [name for name in opened.namelist() if name.endswith(".data/scripts/shardow")]
        for name in commands:
            faults += [f"its command {fault}" for fault in faults_elsewhere(Path(opened.extract(name, folder)))]
        if not commands:
            faults.append("lacks the command shardow")
        licences = {name.split("/licenses/")[1].split("/")[0] for name in opened.namelist() if "/licenses/" in name}
        if lacking := LICENSED - licences:
            faults.append(f"lacks the licences of {', '.join(sorted(lacking))}, which are linked in")
    judged = " ".join(told(tools / "auditwheel", "show", wheel).split())
    if f'is consistent with the following platform tag: "{platform}"' not in judged:
        faults.append(f"is not what its platform tag says: {judged}")
    if (
        "-abi3-" in wheel.name
        and subprocess.run([tools / "abi3audit", "--strict", wheel], capture_output=True).returncode
    ):
        faults.append(f"breaks Python's stable ABI: {told(tools / 'abi3audit', '--strict', '--verbose', wheel)}")
    return faults


def main(wheels: list[str]) -> int:
    failed = not wheels
    for wheel in map(Path, wheels):
        faults = wheel_faults(wheel, Path(sys.executable).parent)
        print(f"{wheel.name}: {wheel.stat().st_size / 1e6:.1f} MB, {'; '.join(faults) or 'as it must be'}")
        failed |= bool(faults)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
