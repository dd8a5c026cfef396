"""The words of the report. Every number in them is computed from the run."""

from __future__ import annotations

import statistics

from .averages import RAW
from .evaluate import Evaluation
from .figures import Run
from .measure import FOREACH, SHARDOW, SOURCES
from .options import Options
from .pictures import sample_sets

HOW = {
    "fsdp2": "FSDP2 (<code>fully_shard</code> on every block and the root)",
    "fsdp1": "FSDP1 (<code>FullyShardedDataParallel</code> around every block and the root)",
    "ddp": "DDP",
    "hsdp": "HSDP (<code>fully_shard</code> on a mesh of replicas and shards)",
    "plain": "plain replicas whose gradients are averaged by hand",
}


def ranks(count: int) -> str:
    return f"{count} rank" if count == 1 else f"{count} ranks"


def megabytes(count: float) -> str:
    return f"{count / 1e6:.2f} MB"


def last(run: Run) -> Evaluation:
    found: Evaluation = run["train"]["evaluations"][-1]
    return found


def headings(run: Run) -> dict[str, str]:
    words = ("Averages of a sharded diffusion model", "What the averages draw", "The averages themselves", "What they cost")
    if not run["options"].use_ema:
        words = ("A sharded diffusion model without averages", "What the weights draw", "Training", "Memory")
    return dict(zip(("title", "drawn", "themselves", "costs"), words, strict=True))


def best(run: Run) -> str:
    """The average whose samples are nearest to the real digits at the checkpoint; where there are none, the weights."""
    return min((name for name in last(run).frechet if name != RAW), key=lambda name: last(run).frechet[name], default=RAW)


def is_equal(run: Run) -> bool:
    """What came back is what was saved: weights, and averages from the checkpoint and from their files."""
    train, resumed = run["train"], run["resume"]
    equal: bool = train["hashes"] == resumed["hashes"] == resumed["file_hashes"] and train["weights"] == resumed["weights"]
    return equal


def step_milliseconds(run: Run) -> float:
    return 1e3 * float(statistics.median(run["train"]["step_seconds"]))


def intro(run: Run) -> str:
    options: Options = run["options"]
    averages = f"{len(options.decays)} average{'s' if len(options.decays) > 1 else ''}"
    kept = f"Shardow kept {averages} of its weights on the way, each rank a part of every one. " if options.use_ema else ""
    on = [name.removeprefix("use_").replace("_", " ") for name in ("use_bf16", "use_activation_checkpointing") if getattr(options, name)]
    switched = f", with {' and '.join(on)}" if on else ""
    return (
        f"A diffusion transformer of {run['train']['costs']['parameters']:,} parameters learned scikit-learn's 1,797 handwritten digits "
        f"(8 × 8 pixels) on {ranks(options.ranks)}, shared by {HOW[options.shard]}{switched}: {options.steps:,} steps of "
        f"{options.batch} images, {step_milliseconds(run):.0f} ms each (median). "
        f"{kept}The whole run, evaluations and resume included, took {run['seconds']:.0f} s."
    )


def tiles(run: Run) -> list[tuple[str, str, str]]:
    """(number, words, kind)"""
    options: Options = run["options"]
    costs, scores, name = run["train"]["costs"], last(run).frechet, best(run)
    equal = is_equal(run)
    resumed = (
        f"{'averages' if options.use_ema else 'weights'} loaded on {ranks(options.resume_ranks)}, against what {ranks(options.ranks)} saved"
    )
    loaded = ("bit-equal" if equal else "DIFFERENT", resumed, "good" if equal else "bad")
    if not options.use_ema:
        return [(f"{scores[RAW]:.3f}", "Fréchet distance of the weights' samples from real digits", ""), loaded]
    seconds = {way: values[1] for way, values in costs["seconds"].items()}
    held = f"of averages on the fullest of {ranks(options.ranks)}; a full copy takes {megabytes(costs['full_copy'])} on each"
    faster = f"the speed of <code>mul_().add_()</code> per tensor: {1e3 * seconds[SHARDOW]:.3f} ms for an update of all averages"
    return [
        (f"{scores[name]:.3f} vs {scores[RAW]:.3f}", f"Fréchet distance from real digits, {name} vs raw weights; lower is better", ""),
        loaded,
        (megabytes(max(costs["bytes"])), held, ""),
        (f"{seconds[SOURCES] / seconds[SHARDOW]:.1f}×", faster, ""),
    ]


def samples(run: Run) -> str:
    options: Options = run["options"]
    exact = "checked in this run" if run["train"]["swap"] else "<strong>NOT so in this run</strong>"
    how = (
        f"After {options.steps:,} steps, from the same noise and for the same classes, in {options.sample_steps} steps of a deterministic "
        "sampler. A column is a class, 0 to 9."
    )
    if not options.use_ema:
        return how
    return (
        f"{how} The averages are put into the sharded model by <code>with ema.swapped(decay=...)</code>; "
        f"after the block the weights are back, bit for bit ({exact})."
    )


def growth(run: Run) -> str:
    averages = " A long average lags behind at the start; later it is steadier than the weights." if run["options"].use_ema else ""
    return f"The same noise sampled as training goes on, for a three and an eight.{averages}"


def captions(run: Run) -> dict[str, str]:
    """By figure, in the order of the report."""
    grids = {f"samples_{name.replace(' ', '_')}": _grid_caption(run, name) for name in sample_sets(run)}
    captions_of = {"distance": _distance_caption, "decay": _decay_caption, "memory": _memory_caption, "update_time": _update_caption}
    return {
        **grids,
        "growth": "From left to right the evaluations by optimizer step, at most eight of them.",
        "frechet": _frechet_caption(run),
        **({name: caption(run) for name, caption in captions_of.items()} if run["options"].use_ema else {}),
        "loss": (
            "<strong>Training loss</strong>, mean over all ranks, every tenth step. A batch depends on the seed and the step, not on the "
            "ranks, so the curve goes on after the resume where it stood."
        ),
        "start": (
            "<strong>Memory of every rank while a model starts</strong>, by <code>shardow.memory.timeline()</code>, above what the "
            f"process had before. {starts(run)}."
        ),
    }


def _grid_caption(run: Run, name: str) -> str:
    if name not in last(run).frechet:
        return f"<strong>{name.capitalize()}</strong>, for comparison"
    score, named = last(run).frechet[name], last(run).named[name]
    return f"<strong>{name.capitalize()}</strong>: Fréchet distance {score:.3f}; the classifier sees the class asked for in {named:.1%}"


def _frechet_caption(run: Run) -> str:
    scale, judge = run["train"]["real"], run["train"]["judge"]
    return (
        f"<strong>Fréchet distance</strong> of {run['options'].samples} samples from all real digits, in the space of the last hidden "
        f"layer of a classifier that names {judge:.1%} of held-out digits rightly. As many real digits of the same classes, drawn with "
        f"replacement, are {scale['mean']:.3f} away on average (band: {scale['least']:.3f} to {scale['most']:.3f} in {scale['draws']} "
        "draws). Hollow points: after the resume."
    )


def _distance_caption(run: Run) -> str:
    apart = ", ".join(f"{name} {100 * value:.1f} %" for name, value in last(run).apart.items())
    return (
        f"<strong>How far the averages are from the weights</strong>, by <code>ema.distance()</code>; at the checkpoint: {apart}. "
        "It is the noise that the last steps added to the weights, and the way that the average lags behind."
    )


def _decay_caption(run: Run) -> str:
    targets = zip(run["train"]["decay"][-1][1:], run["options"].decays, strict=True)
    reached = ", ".join(f"{decay:.4f} ({1 / (1 - decay):.0f} steps) of {target:g}" for decay, target in targets)
    return (
        "<strong>Decay of every step</strong>, and its window, 1 / (1 − decay). The debiased schedule begins as a plain mean, so that the "
        f"first weights don't stay in a long average, and tends to the decay that was asked for. At the checkpoint: {reached}. "
        "The schedule's state is in the checkpoint, and the resume continues it."
    )


def _memory_caption(run: Run) -> str:
    options: Options = run["options"]
    held, full = run["train"]["costs"]["bytes"], run["train"]["costs"]["full_copy"]
    return (
        f"<strong>Memory of the averages</strong> ({len(options.decays)}, float32), <code>ema.stats()['bytes']</code> on every rank: "
        f"{megabytes(sum(held))} on {ranks(len(held))} together. With a full copy on every rank, 4 bytes for each parameter and decay, "
        f"it would be {megabytes(len(held) * full)}."
    )


def _update_caption(run: Run) -> str:
    costs = run["train"]["costs"]
    low, middle, high = (1e3 * s for s in costs["seconds"][SHARDOW])
    ratios = {way: costs["seconds"][way][1] / costs["seconds"][SHARDOW][1] for way in (FOREACH, SOURCES)}
    return (
        f"<strong>Time of an update</strong> of all averages on rank 0's part, threads: {costs['threads']}, each way in turn for "
        f"{costs['rounds']} rounds, while the other ranks do the same. Shardow: {middle:.3f} ms (quartiles {low:.3f} to {high:.3f}), "
        f"its checks of every parameter included; foreach lerp takes {ratios[FOREACH]:.1f}×, <code>mul_().add_()</code> per tensor "
        f"{ratios[SOURCES]:.1f}× as long. An update is {middle / step_milliseconds(run):.2%} of a training step. "
        "So small a model shows overhead more than bandwidth: <code>make bench</code> has large ones."
    )


def evaluations(run: Run) -> tuple[list[str], list[list[str]]]:
    """(head, rows) of a table: both measures of every set of weights, at every evaluation."""
    names = list(last(run).frechet)
    head = ["step", *[f"Fréchet, {name}" for name in names], *[f"as asked, {name}" for name in names]]
    rows = []
    for part, mark in (("train", ""), ("resume", " *")):
        for e in run[part]["evaluations"]:
            rows.append([f"{e.step:,}{mark}", *[f"{e.frechet[n]:.3f}" for n in names], *[f"{e.named[n]:.1%}" for n in names]])
    return head, rows


def planned(run: Run) -> tuple[list[str], list[list[str]]]:
    """(head, rows) of a table."""
    rows = [[key, f"{one['planned']:,}", f"{one['measured']:,}"] for key, one in run["train"]["memory"].items()]
    return ["bytes of", "planned", "measured"], rows


def resume(run: Run) -> str:
    options: Options = run["options"]
    files = {name: f"{count / 1e6:.1f} MB" for name, count in run["train"]["files"].items()}
    what, of_averages = (
        "the model and the optimizer",
        f"the weights for inference into safetensors files (<code>shardow.save()</code>, {files['exported']})",
    )
    if options.use_ema:
        what = "the model, the optimizer and the averages"
        of_averages = (
            f"the averages also into safetensors files, to resume from (<code>ema.save()</code>, {files['averages']}) and for inference "
            f"(<code>ema.export()</code>, {files['exported']})"
        )
    return (
        f"At step {run['resume']['step']:,} {what} went into a sharded checkpoint (<code>torch.distributed.checkpoint</code>, "
        f"{files['checkpoint']}); {of_averages}. "
        f"Then {ranks(options.resume_ranks)} in fresh processes, whose model began from other weights, loaded what was saved and trained "
        f"{options.resume_steps} steps more. The table compares SHA-256 over the names, shapes and bytes of the full tensors, shortened."
    )


def starts(run: Run) -> str:
    found = run["starts"]
    most = {name: max(one.peak - one.before for one in ranks) for name, ranks in found["timelines"].items()}
    took = {name: max(one.resident[-1][0] - one.resident[0][0] for one in ranks) for name, ranks in found["timelines"].items()}
    each = "; ".join(f"{name}, {most[name] / 2**20:.0f} MiB at most, {took[name]:.1f} s" for name in most)
    return (
        f"{found['parameters'] / 1e6:.1f} M parameters, {4 * found['parameters'] / 2**20:.0f} MiB, on {ranks(run['options'].ranks)}: {each}"
    )


def comparisons(run: Run) -> tuple[list[str], list[list[str]]]:
    """(head, rows) of a table: each average, and the weights, before and after."""
    options, train, resumed = run["options"], run["train"], run["resume"]
    there = ranks(options.resume_ranks)
    head = ["", f"saved by {ranks(options.ranks)}", f"checkpoint on {there}", f"ema.load() on {there}", "before loading", "result"]
    names = [*(f"average {decay:g}" for decay in options.decays), RAW]
    saved, loaded = [*train["hashes"], train["weights"]], [*resumed["hashes"], resumed["weights"]]
    rows = []
    for k, name in enumerate(names):
        from_file = resumed["file_hashes"][k] if name != RAW else ""
        cells = [f"<code>{digest[:12]}</code>" if digest else "" for digest in (saved[k], loaded[k], from_file, resumed["before"][k])]
        equal = len({saved[k], loaded[k], from_file or saved[k]}) == 1
        rows.append([name, *cells, "equal" if equal else "<strong>different</strong>"])
    return head, rows
