"""The demo from end to end: train and average on several ranks, save, resume on others, report.

.venv/bin/python -m examples.digits             # about a minute and a half on two cores
.venv/bin/python -m examples.digits --quick     # the same path in seconds
"""

from __future__ import annotations

import contextlib
import shlex
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

if not __package__:  # started by path
    sys.path[0] = str(Path(__file__).resolve().parents[2])

from examples.digits.options import Options, parse


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    command = shlex.join(["python", "-m", "examples.digits", *(sys.argv[1:] if arguments is None else arguments)])
    from torch.multiprocessing.spawn import ProcessException

    try:
        return _run(options, command)
    except ProcessException as error:
        options.out.mkdir(parents=True, exist_ok=True)
        (options.out / "error.txt").write_text(str(error))
        message = str(error).strip().splitlines()[-1]
        print(f"\nThe demo stopped: rank {error.error_index}: {message}", file=sys.stderr)
        print(f"The traceback is in {options.out / 'error.txt'}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\nStopped.", file=sys.stderr)
        return 130


def _run(options: Options, command: str) -> int:
    from examples.digits import data, judge, launch, report, train

    begin = time.monotonic()
    kept = f"averages of decay {' and '.join(map(str, options.decays))}" if options.use_ema else "no averages"
    there = report.ranks(options.resume_ranks)
    setting = f"{report.ranks(options.ranks)}, {options.shard}, {kept}"
    print(f"A small diffusion transformer learns 1,797 handwritten digits: {setting}.")
    run: dict[str, Any] = {"options": options, "command": command}
    run["real_images"] = data.load().of_each_class(judge.KEPT)
    with stage(f"1 of 2: training, then a checkpoint at step {options.steps}"):
        run["train"] = launch.run(options.ranks, train.run, options)
    with stage(f"2 of 2: resuming from it on {there} in fresh processes"):
        run["resume"] = launch.run(options.resume_ranks, train.resume, options, run["train"]["classifier"])
    run["seconds"] = time.monotonic() - begin
    page, equal = report.write(run, options.out), report.is_equal(run)
    print(f"\n{report.result(run)}\n\nDone in {run['seconds']:.0f} s. Open {page}")
    return 0 if equal and run["train"]["swap"] is not False else 1


@contextlib.contextmanager
def stage(what: str) -> Iterator[None]:
    """Names a part, and says after it how long it took."""
    begin = time.monotonic()
    print(f"Part {what}", flush=True)
    yield
    print(f"  took {time.monotonic() - begin:.0f} s", flush=True)


if __name__ == "__main__":
    sys.exit(main())
