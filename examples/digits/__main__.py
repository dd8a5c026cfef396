"""The demo from end to end: train and average on several ranks, save, resume on others, report.

.venv/bin/python -m examples.digits             # about four minutes on two cores
.venv/bin/python -m examples.digits --quick     # the same path in seconds
"""

from __future__ import annotations

import contextlib
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

USUAL = {"1 of 3, training": 140, "2 of 3, resuming": 45, "3 of 3, starting": 15}  # seconds


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    command = shlex.join(["python", "-m", "examples.digits", *(sys.argv[1:] if arguments is None else arguments)])
    try:
        return _run(options, command)
    except launch.RankError as error:
        print(f"\nThe demo stopped: {error}", file=sys.stderr)
        options.out.mkdir(parents=True, exist_ok=True)
        (options.out / "error.txt").write_text(error.details)
        print(f"The traceback is in {options.out / 'error.txt'}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\nStopped.", file=sys.stderr)
        return 130


def _run(options: Options, command: str) -> int:
    from examples.digits import report, starts, text, train

    begin = time.monotonic()
    kept = f"averages of decay {' and '.join(map(str, options.decays))}" if options.use_ema else "no averages"
    how = f"{text.ranks(options.ranks)}, {options.shard}, {kept}"
    print(f"A small diffusion transformer learns 1,797 handwritten digits: {how}.")
    usual = USUAL if replace(options, out=Options.out) == Options() else {}
    with stage("1 of 3, training", usual):
        trained = launch.run(options.ranks, train.run, options)
    print(f"Checkpoint at step {options.steps}. {text.ranks(options.resume_ranks).capitalize()} in fresh processes go on from it:")
    with stage("2 of 3, resuming", usual):
        resumed = launch.run(options.resume_ranks, train.resume, options, trained["classifier"], trained["judge"])
    run = _gathered(options, command, trained, resumed)
    equal = text.is_equal(run)
    what = "averages" if options.use_ema else "weights"
    print(f"  {what} after the resume: {'bit for bit those that were saved' if equal else 'NOT those that were saved'}")
    print("A larger model is started twice, whole on every rank and without memory:")
    with stage("3 of 3, starting", usual):
        run["starts"] = starts.compare(options)
    print(f"  {text.starts(run)}")
    run["seconds"] = time.monotonic() - begin
    page = report.write(run, options.out)
    _summary(run, page)
    return 0 if equal and trained["swap"] is not False else 1


@contextlib.contextmanager
def stage(what: str, usual: dict[str, int]) -> Iterator[None]:
    """Says before how long a part usually takes, and after it how long it took."""
    begin = time.monotonic()
    print(f"Part {what}{f': usually about {usual[what]} s on two quiet cores' if what in usual else ''}", flush=True)
    yield
    print(f"  took {time.monotonic() - begin:.0f} s", flush=True)


def _gathered(options: Options, command: str, trained: dict[str, Any], resumed: dict[str, Any]) -> dict[str, Any]:
    import torch

    from examples.digits import data, machine
    from examples.digits.evaluate import KEPT

    digits = data.load()
    rows = [torch.nonzero(digits.labels == c).flatten()[: KEPT // data.CLASSES] for c in range(data.CLASSES)]
    real = digits.images[torch.stack(rows, dim=1).flatten()]
    return {"options": options, "command": command, "train": trained, "resume": resumed, "real_images": real, "machine": machine.facts()}


def _summary(run: dict[str, Any], page: Path) -> None:
    from examples.digits import text
    from examples.digits.averages import RAW
    from examples.digits.measure import SHARDOW, SOURCES

    costs, scores, best, memory = run["train"]["costs"], text.last(run).frechet, text.best(run), run["train"]["memory"]
    middle = {way: 1e3 * seconds[1] for way, seconds in costs["seconds"].items()}
    raw = f"raw weights {scores[RAW]:.3f}"
    print(f"\n  Frechet distance   {raw if best == RAW else f'{best} {scores[best]:.3f}, {raw}'}")
    print(f"  memory per rank    {memory['total']['planned'] / 1e6:.2f} MB planned, {memory['total']['measured'] / 1e6:.2f} MB measured")
    if middle:
        print(f"  of averages        {max(costs['bytes']) / 1e6:.2f} MB, a full copy would take {costs['full_copy'] / 1e6:.2f} MB")
        print(f"  time per update    {middle[SHARDOW]:.3f} ms, mul_().add_() per tensor {middle[SOURCES]:.3f} ms")
    print(f"\nDone in {run['seconds']:.0f} s. Open {page}")


if __name__ == "__main__":
    sys.exit(main())
