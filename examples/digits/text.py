"""The words of the report. Every number in them is from the run: str.format() fills the fields from ``facts()``."""

from __future__ import annotations

import statistics
from typing import Any

from .averages import RAW, name_of
from .evaluate import Evaluation
from .measure import FOREACH, SHARDOW, SOURCES
from .options import Options
from .theme import Run

HOW = {
    "fsdp2": "FSDP2 (<code>fully_shard</code> on every block and the root)",
    "fsdp1": "FSDP1 (<code>FullyShardedDataParallel</code> around every block and the root)",
    "ddp": "DDP",
    "hsdp": "HSDP (<code>fully_shard</code> on a mesh of replicas and shards)",
    "plain": "plain replicas whose gradients are averaged by hand",
}
HEADINGS = {
    True: (
        "Averages of a sharded diffusion model",
        "What the averages draw",
        "The averages themselves",
        "What they cost",
    ),
    False: ("A sharded diffusion model without averages", "What the weights draw", "Training", "Memory"),
}
INTRO = (
    "A diffusion transformer of {train[costs][parameters]:,} parameters learned scikit-learn's 1,797 handwritten "
    "digits (8 × 8 pixels) on "
    "{here}, shared by {how}{switched}: {options.steps:,} steps of {options.batch} images, {step:.0f} ms each "
    "(median). {kept}The whole "
    "run, evaluations and resume included, took {seconds:.0f} s."
)
SAMPLES = (
    "After {options.steps:,} steps, from the same noise and for the same classes, in {options.sample_steps} steps of "
    "a deterministic "
    "sampler. A column is a class, 0 to 9."
)
SWAPPED = (
    " The averages are put into the sharded model by <code>with ema.swapped(decay=...)</code>; after the block the "
    "weights are back, bit "
    "for bit ({exact})."
)
GROWTH = "The same noise sampled as training goes on, for a three and an eight."
LAG = " A long average lags behind at the start; later it is steadier than the weights."
RESUME = (
    "At step {resume[step]:,} {what} went into a sharded checkpoint (<code>torch.distributed.checkpoint</code>, "
    "{files[checkpoint]:.1f} "
    "MB); {files_of_averages}. Then {there} in fresh processes, whose model began from other weights, loaded what was "
    "saved and trained "
    "{options.resume_steps} steps more. The table compares SHA-256 over the names, shapes and bytes of the full "
    "tensors, shortened."
)
FILES = {
    True: (
        "the averages also into safetensors files, to resume from (<code>ema.save()</code>, {files[averages]:.1f} MB) "
        "and for inference "
        "(<code>ema.export()</code>, {files[exported]:.1f} MB)"
    ),
    False: "the weights for inference into safetensors files (<code>shardow.save()</code>, {files[exported]:.1f} MB)",
}
AFTERWARDS = (
    "Nobody asked for these while the model trained. Snapshots of two averages, of widths 0.05 and 0.1, were saved, "
    "and sums of "
    "{afterwards[snapshots]} of them are averages of three more widths (<code>shardow.posthoc.synthesize()</code>). "
    "To compare, the three "
    "were tracked too. No weight may be further from the tracked one than promised, before anything is computed, in "
    "parts of the span "
    "that it covered in training; at worst it was {afterwards[share]:.0%} of that. The last rows are merges of "
    "{afterwards[raw]} "
    "checkpoints of the weights themselves, read straight into the sharded model (<code>shardow.merged()</code>)."
)
STARTS = "{millions:.1f} M parameters, {mebibytes:.0f} MiB, on {here}: {each}"
CAPTIONS = {
    "growth": "From left to right the evaluations by optimizer step, at most eight of them.",
    "frechet": (
        "<strong>Fréchet distance</strong> of {options.samples} samples from all real digits, in the space of the "
        "last hidden layer of a "
        "classifier that names {train[judge]:.1%} of held-out digits rightly. As many real digits of the same "
        "classes, drawn with "
        "replacement, are {real[mean]:.3f} away on average (band: {real[least]:.3f} to {real[most]:.3f} in "
        "{real[draws]} draws). Hollow "
        "points: after the resume."
    ),
    "loss": (
        "<strong>Training loss</strong>, mean over all ranks, every tenth step. A batch depends on the seed and the "
        "step, not on the "
        "ranks, so the curve goes on after the resume where it stood."
    ),
    "start": (
        "<strong>Memory of every rank while a model starts</strong>, by <code>shardow.memory.timeline()</code>, above "
        "what the process "
        f"had before. {STARTS}."
    ),
}
CAPTIONS_OF_AVERAGES = {
    "afterwards": (
        "<strong>Averages of any width, made after training</strong> from snapshots of two (0.05 and 0.1), beside "
        "those that were tracked: "
        "the best width is known when all is over."
    ),
    "merges": (
        "<strong>Merges of the checkpoints</strong> of a run whose learning rate stayed constant: means stand in for "
        "its decay."
    ),
    "distance": (
        "<strong>How far the averages are from the weights</strong>, by <code>ema.distance()</code>; at the "
        "checkpoint: {apart}. It is the "
        "noise that the last steps added to the weights, and the way that the average lags behind."
    ),
    "decay": (
        "<strong>Decay of every step</strong>, and its window, 1 / (1 − decay). The debiased schedule begins as a "
        "plain mean, so that the "
        "first weights don't stay in a long average, and tends to the decay that was asked for. At the checkpoint: "
        "{reached}. The "
        "schedule's state is in the checkpoint, and the resume continues it."
    ),
    "memory": (
        "<strong>Memory of the averages</strong> ({averages}, float32), <code>ema.stats()['bytes']</code> on every "
        "rank: {held:.2f} MB on "
        "{here} together. With a full copy on every rank, 4 bytes for each parameter and decay, it would be "
        "{copies:.2f} MB."
    ),
    "update_time": (
        "<strong>Time of an update</strong> of all averages on rank 0's part, threads: {train[costs][threads]}, each "
        "way in turn for "
        "{train[costs][rounds]} rounds, while the other ranks do the same. Shardow: {update[1]:.3f} ms (quartiles "
        "{update[0]:.3f} to "
        "{update[2]:.3f}), its checks of every parameter included; foreach lerp takes {times[0]:.1f}×, "
        "<code>mul_().add_()</code> per "
        "tensor {times[1]:.1f}× as long. An update is {share:.2%} of a training step. So small a model shows overhead "
        "more than bandwidth: "
        "<code>make bench</code> has large ones."
    ),
}  # fmt: skip
TILES = [
    ("{best[1]:.3f} vs {raw:.3f}", "Fréchet distance from real digits, {best[0]} vs raw weights; lower is better"),
    ("{most:.2f} MB", "of averages on the fullest of {here}; a full copy takes {full:.2f} MB on each"),
    (
        "{times[1]:.1f}×",
        "the speed of <code>mul_().add_()</code> per tensor: {update[1]:.3f} ms for an update of all averages",
    ),
]
TILE_WITHOUT = ("{raw:.3f}", "Fréchet distance of the weights' samples from real digits")


def ranks(count: int) -> str:
    return f"{count} rank" if count == 1 else f"{count} ranks"


def last(run: Run) -> Evaluation:
    found: Evaluation = run["train"]["evaluations"][-1]
    return found


def best(run: Run) -> tuple[str, float]:
    """The average whose samples are nearest to the real digits at the checkpoint, and how near; where there are none,
    the weights.
    """
    scores = last(run).frechet
    name = min((name for name in scores if name != RAW), key=scores.__getitem__, default=RAW)
    return name, scores[name]


def is_equal(run: Run) -> bool:
    """What came back is what was saved: weights, and averages from the checkpoint and from their files."""
    train, resumed = run["train"], run["resume"]
    equal: bool = (
        train["hashes"] == resumed["hashes"] == resumed["file_hashes"] and train["weights"] == resumed["weights"]
    )
    return equal


def facts(run: Run) -> dict[str, Any]:
    """The run, and what is computed from it."""
    options: Options = run["options"]
    train, costs = run["train"], run["train"]["costs"]
    on = [
        name.removeprefix("use_").replace("_", " ")
        for name in ("use_bf16", "use_activation_checkpointing")
        if getattr(options, name)
    ]
    averages = f"{len(options.decays)} average{'s' if len(options.decays) > 1 else ''}"
    found = {
        "here": ranks(options.ranks), "there": ranks(options.resume_ranks), "how": HOW[options.shard],
        "switched": f", with {' and '.join(on)}" if on else "", "step": 1e3 * statistics.median(train["step_seconds"]),
        "kept": f"Shardow kept {averages} of its weights on the way, each rank a part of every one. "
        if options.use_ema
        else "",
        "real": train["real"], "raw": last(run).frechet[RAW], "best": best(run),
        "what": "the model, the optimizer and the averages" if options.use_ema else "the model and the optimizer",
        "files": {name: count / 1e6 for name, count in train["files"].items()},
        "exact": "checked in this run" if train["swap"] else "<strong>NOT so in this run</strong>",
        "averages": len(options.decays), "full": costs["full_copy"] / 1e6,
        "copies": len(costs["bytes"]) * costs["full_copy"] / 1e6,
        "held": sum(costs["bytes"]) / 1e6, "most": max(costs["bytes"]) / 1e6, **_starts(run["starts"]),
    }  # fmt: skip
    found["files_of_averages"] = FILES[options.use_ema].format_map(found)
    return {
        **run,
        **found,
        **({**_of_averages(run, found["step"]), **_made(train["afterwards"])} if options.use_ema else {}),
    }


def _made(afterwards: dict[str, Any]) -> dict[str, Any]:
    most = {key: max(one[key] for one in afterwards["widths"]) for key in ("snapshots", "share")}
    return {"afterwards": {**most, "raw": afterwards["raw"]}}


def _of_averages(run: Run, step: float) -> dict[str, Any]:
    seconds = run["train"]["costs"]["seconds"]
    targets = zip(run["train"]["decay"][-1][1:], run["options"].decays, strict=True)
    return {
        "update": [1e3 * quartile for quartile in seconds[SHARDOW]],
        "times": [seconds[way][1] / seconds[SHARDOW][1] for way in (FOREACH, SOURCES)],
        "share": 1e3 * seconds[SHARDOW][1] / step,
        "apart": ", ".join(f"{name} {100 * value:.1f} %" for name, value in last(run).apart.items()),
        "reached": ", ".join(f"{decay:.4f} ({1 / (1 - decay):.0f} steps) of {target:g}" for decay, target in targets),
    }


def _starts(starts: dict[str, Any]) -> dict[str, Any]:
    each = []
    for name, ranks_of in starts["timelines"].items():
        most = max(one.peak - one.before for one in ranks_of)
        took = max(one.resident[-1][0] - one.resident[0][0] for one in ranks_of)
        each.append(f"{name}, {most / 2**20:.0f} MiB at most, {took:.1f} s")
    return {
        "millions": starts["parameters"] / 1e6,
        "mebibytes": 4 * starts["parameters"] / 2**20,
        "each": "; ".join(each),
    }


def words(run: Run) -> dict[str, str]:
    """What page.html asks for and is neither a figure nor a table."""
    averages, known = run["options"].use_ema, facts(run)
    texts = {
        "intro": INTRO, "samples_text": SAMPLES + (SWAPPED if averages else ""),
        "growth_text": GROWTH + (LAG if averages else ""),
        "resume_text": RESUME,
    }  # fmt: skip
    texts["afterwards_text"] = AFTERWARDS if averages else "There were no averages to take snapshots of."
    headings = dict(zip(("title", "drawn", "themselves", "costs"), HEADINGS[averages], strict=True))
    return headings | {name: text.format_map(known) for name, text in texts.items()}


def tiles(run: Run) -> list[tuple[str, str, str]]:
    """(number, words, kind)"""
    averages, equal, known = run["options"].use_ema, is_equal(run), facts(run)
    loaded = "{} loaded on {there}, against what {here} saved".format("averages" if averages else "weights", **known)
    first, *others = [
        (number.format_map(known), said.format_map(known), "")
        for number, said in (TILES if averages else [TILE_WITHOUT])
    ]
    return [first, ("bit-equal" if equal else "DIFFERENT", loaded, "good" if equal else "bad"), *others]


def captions(run: Run) -> dict[str, str]:
    """By figure."""
    known, evaluation = facts(run), last(run)
    found = {"samples_real_digits": "<strong>Real digits</strong>, for comparison"}
    for name, score in evaluation.frechet.items():
        seen = f"the classifier sees the class asked for in {evaluation.named[name]:.1%}"
        found[f"samples_{name.replace(' ', '_')}"] = (
            f"<strong>{name.capitalize()}</strong>: Fréchet distance {score:.3f}; {seen}"
        )
    chosen = CAPTIONS | (CAPTIONS_OF_AVERAGES if run["options"].use_ema else {})
    return found | {name: text.format_map(known) for name, text in chosen.items()}


def evaluations(run: Run) -> tuple[list[str], list[list[str]]]:
    """(head, rows) of a table: both measures of every set of weights, at every evaluation."""
    names = list(last(run).frechet)
    head = ["step", *[f"Fréchet, {name}" for name in names], *[f"as asked, {name}" for name in names]]
    rows = []
    for part, mark in (("train", ""), ("resume", " *")):
        for e in run[part]["evaluations"]:
            rows.append(
                [f"{e.step:,}{mark}", *[f"{e.frechet[n]:.3f}" for n in names], *[f"{e.named[n]:.1%}" for n in names]]
            )
    return head, rows


def afterwards(run: Run) -> tuple[list[str], list[list[str]]]:
    """(head, rows) of a table: averages made after training, beside the same ones tracked where there are."""
    head = [
        "made afterwards",
        "Fréchet",
        "Fréchet of the tracked one",
        "residual",
        "error promised, of a weight's span",
        "of that",
    ]
    rows = []
    for one in run["train"]["afterwards"]["widths"]:
        distances = [f"{one[key]:.3f}" for key in ("made", "tracked")]
        told = [f"{one['residual']:.2%}", f"{one['variation']:.2%}", f"{one['share']:.1%}"]
        rows.append([f"power function, sigma_rel {one['sigma_rel']:g}", *distances, *told])
    rows += [
        [f"raw checkpoints: {name}", f"{found:.3f}", "", "", "", ""]
        for name, found in run["train"]["afterwards"]["merges"].items()
    ]
    return head, rows


def comparisons(run: Run) -> tuple[list[str], list[list[str]]]:
    """(head, rows) of a table: each average, and the weights, before and after."""
    options, train, resumed = run["options"], run["train"], run["resume"]
    there = ranks(options.resume_ranks)
    head = [
        "",
        f"saved by {ranks(options.ranks)}",
        f"checkpoint on {there}",
        f"ema.load() on {there}",
        "before loading",
        "result",
    ]
    digests = zip(
        [*train["hashes"], train["weights"]], [*resumed["hashes"], resumed["weights"]], [*resumed["file_hashes"], ""],
        resumed["before"],
        strict=True,
    )  # fmt: skip
    rows = []
    for name, (saved, loaded, from_file, before) in zip([*map(name_of, options.decays), RAW], digests, strict=True):
        cells = [f"<code>{digest[:12]}</code>" if digest else "" for digest in (saved, loaded, from_file, before)]
        rows.append(
            [name, *cells, "equal" if saved == loaded == (from_file or saved) else "<strong>different</strong>"]
        )
    return head, rows
