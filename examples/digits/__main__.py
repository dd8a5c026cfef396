"""The demo from end to end: train and average on several ranks, save, resume on others, report.

.venv/bin/python -m examples.digits             # about three minutes on two cores
.venv/bin/python -m examples.digits --quick     # the same path in seconds
"""

from __future__ import annotations

import contextlib
import re
import shlex
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

if not __package__:  # started by path
    sys.path[0] = str(Path(__file__).resolve().parents[2])

from examples.digits import launch
from examples.digits.options import Options, parse

USUAL = {"1 of 3, training": 140, "2 of 3, resuming": 20, "3 of 3, starting": 5}  # seconds


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    command = shlex.join(["python", "-m", "examples.digits", *(sys.argv[1:] if arguments is None else arguments)])
    try:
        return _run(options, command)
    except launch.RankError as error:
        message, trace = error.args
        print(f"\nThe demo stopped: {message}", file=sys.stderr)
        options.out.mkdir(parents=True, exist_ok=True)
        (options.out / "error.txt").write_text(trace)
        print(f"The traceback is in {options.out / 'error.txt'}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\nStopped.", file=sys.stderr)
        return 130


def _run(options: Options, command: str) -> int:
    from examples.digits import data, report, starts, text, train
    from examples.digits.evaluate import KEPT

    begin = time.monotonic()
    kept = f"averages of decay {' and '.join(map(str, options.decays))}" if options.use_ema else "no averages"
    print(
        f"A small diffusion transformer learns 1,797 handwritten digits: {text.ranks(options.ranks)}, "
        f"{options.shard}, {kept}."
    )
    usual = USUAL if replace(options, out=Options.out) == Options() else {}
    run: dict[str, Any] = {"options": options, "command": command, "real_images": data.load().of_each_class(KEPT)}
    with stage("1 of 3, training", usual):
        run["train"] = launch.run(options.ranks, train.run, options)
    print(
        f"Checkpoint at step {options.steps}. {text.ranks(options.resume_ranks).capitalize()} in fresh processes go "
        "on from it:"
    )
    with stage("2 of 3, resuming", usual):
        run["resume"] = launch.run(
            options.resume_ranks, train.resume, options, run["train"]["classifier"], run["train"]["judge"]
        )
    equal = text.is_equal(run)
    what = "averages" if options.use_ema else "weights"
    print(f"  {what} after the resume: {'bit for bit those that were saved' if equal else 'NOT those that were saved'}")
    print("A larger model is started twice, whole on every rank and without memory:")
    with stage("3 of 3, starting", usual):
        run["starts"] = starts.compare(options)
    run["seconds"] = time.monotonic() - begin
    page = report.write(run, options.out)
    for number, words, _ in text.tiles(run):
        print(f"  {number:>14}  {re.sub('<[^>]*>', '', words)}")
    print(f"\nDone in {run['seconds']:.0f} s. Open {page}")
    return 0 if equal and run["train"]["swap"] is not False else 1


@contextlib.contextmanager
def stage(what: str, usual: dict[str, int]) -> Iterator[None]:
    """Says before how long a part usually takes, and after it how long it took."""
    begin = time.monotonic()
    print(f"Part {what}{f': usually about {usual[what]} s on two quiet cores' if what in usual else ''}", flush=True)
    yield
    print(f"  took {time.monotonic() - begin:.0f} s", flush=True)


if __name__ == "__main__":
    sys.exit(main())
