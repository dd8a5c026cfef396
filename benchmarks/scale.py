"""What coordination costs against the number of ranks and of tensors: ``python -m benchmarks.scale [section ...]
[--sizes n ...]``.

Sections, all of them unless some are named: ``emulated`` (ranks that are threads, to 4,096), ``processes`` (to 32),
``tensors`` (to a million), ``work`` (the same in instructions, which valgrind counts), ``paper`` (what follows for
16,384 ranks and 10 T parameters, from figures of this machine).
docs/scale.md is made of what it prints.
"""

from __future__ import annotations

import argparse

from benchmarks import scale_emulated, scale_paper, scale_processes, scale_tensors, scale_work

SECTIONS = {
    "emulated": (scale_emulated, scale_emulated.RANKS),
    "processes": (scale_processes, scale_processes.SIZES),
    "tensors": (scale_tensors, scale_tensors.SIZES),
    "work": (scale_work, scale_work.SIZES),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sections", nargs="*", choices=[*SECTIONS, "paper", []], help="all unless some are named")
    parser.add_argument("--sizes", nargs="+", type=int, help="of one section")
    options = parser.parse_args()
    for name in options.sections or [*SECTIONS, "paper"]:
        print(f"\n{name}")
        if name == "paper":
            print("\n".join(scale_paper.lines()))
            continue
        section, sizes = SECTIONS[name]
        print("\n".join(section.lines(section.run(options.sizes or list(sizes)))), flush=True)


if __name__ == "__main__":
    main()
