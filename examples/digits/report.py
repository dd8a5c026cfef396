"""The report: one HTML file that needs nothing beside it; its pictures as files, too, and every number in results.json.

Every number in its words is from the run.
"""

from __future__ import annotations

import base64
import html
import io
import json
import os
import platform
import re
from pathlib import Path
from string import Template
from typing import Any

import sklearn
import torch
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure

import shardow

from .averages import RAW
from .judge import Evaluation

Run = dict[str, Any]  # gathered by __main__: options, command, seconds, real_images, train, resume
FAINT, GRID, ORANGE, BLUES = "#5b6475", "#e6e9ef", "#d9692b", ("#2c6fbb", "#17917a", "#7a4fb5", "#b03a6f")
LOOK = {
    "figure.constrained_layout.use": True,
    "savefig.dpi": 160,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "grid.color": GRID,
    "axes.axisbelow": True,
    "legend.edgecolor": "none",
    **dict.fromkeys(("axes.labelcolor", "xtick.color", "ytick.color"), FAINT),
    **dict.fromkeys(("axes.spines.left", "axes.spines.right", "axes.spines.top"), False),
}
SHOWN, MOST = (3, 8), 8  # digits that are followed over training; evaluations that are drawn


def write(run: Run, out: Path) -> Path:
    """Returns the path of report.html; pictures are in figures/ beside it."""
    draws = [quality, samples, growth, *([afterwards, merges] if run["options"].use_ema else [])]
    (out / "figures").mkdir(parents=True, exist_ok=True)
    pictures = {}
    with rc_context(LOOK):
        for draw in draws:
            buffer = io.BytesIO()
            draw(run).savefig(buffer, format="png", metadata={"Software": None})
            (out / "figures" / f"{draw.__name__}.png").write_bytes(buffer.getvalue())
            source = f"data:image/png;base64,{base64.b64encode(buffer.getvalue()).decode()}"
            pictures[draw.__name__] = f'<img src="{source}" alt="{draw.__name__}">'
    (out / "results.json").write_text(json.dumps(numbers(run), indent=1) + "\n", encoding="utf-8")
    page = out / "report.html"
    template = Template((Path(__file__).parent / "page.html").read_text(encoding="utf-8"))
    page.write_text(template.substitute(words(run, pictures)), encoding="utf-8")
    return page


# ---- pictures


def colour(run: Run, name: str) -> str:
    return ORANGE if name == RAW else BLUES[list(run["train"]["evaluations"][0].frechet).index(name) - 1]


def log_axes(figure: Figure, **labels: str) -> Axes:
    axes = figure.add_subplot(yscale="log", ylabel="Fréchet distance (log scale, lower is better)", **labels)
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.yaxis.set_minor_formatter(lambda value, _: "")
    return axes


def quality(run: Run) -> Figure:
    """Every set of weights over training, beside the scale that real digits give."""
    figure, options, real = Figure((8.6, 4.2)), run["options"], run["train"]["real"]
    axes = log_axes(figure, xlabel="optimizer step")
    axes.axhspan(min(real), max(real), color=FAINT, alpha=0.2, linewidth=0, label="real digits, drawn again")
    for name in run["train"]["evaluations"][0].frechet:
        for part, inside in (("train", None), ("resume", "white")):
            points = [(e.step, e.frechet[name]) for e in run[part]["evaluations"]]
            label = name if part == "train" else None
            axes.plot(*zip(*points, strict=True), "o-", color=colour(run, name), ms=4, mfc=inside, label=label)
    axes.axvline(options.steps, color=FAINT, linewidth=1, linestyle=":")
    note = f"resumed, {options.ranks} → {options.resume_ranks} ranks"
    axes.annotate(note, (options.steps, 1), xycoords=("data", "axes fraction"), ha="right", va="top", color=FAINT)
    axes.set_yticks([0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10])
    axes.minorticks_off()
    axes.set_ylim(top=10 * last(run).frechet[RAW])  # the start is far above
    axes.legend(loc="upper center")
    return figure


def show(axes: Axes, images: torch.Tensor, columns: int) -> None:
    """(n, 1, 8, 8) as one picture, row by row, with a gap around every image."""
    rows = len(images) // columns
    framed = torch.nn.functional.pad(images[: rows * columns, 0], (1, 1, 1, 1), value=-1.0)
    picture = framed.unflatten(0, (rows, columns)).permute(0, 2, 1, 3).flatten(2).flatten(0, 1)
    axes.imshow(picture, cmap="gray_r", vmin=-1, vmax=1, interpolation="nearest")
    axes.set(xticks=[], yticks=[])
    axes.spines[:].set(visible=True, color=GRID)


def samples(run: Run) -> Figure:
    """Real digits, then the samples of each set of weights from the same noise; a column for each class."""
    sets = {"real digits": run["real_images"], **run["train"]["evaluations"][-1].images}
    rows = -(-len(sets) // 2)
    figure = Figure((9.0, 3.1 * rows))
    for place, (name, images) in enumerate(sets.items(), 1):
        show(figure.add_subplot(rows, 2, place, title=name), images, 10)
    return figure


def growth(run: Run) -> Figure:
    """The same noise over training: a row for each set of weights, a column for each evaluation."""
    evaluations = run["train"]["evaluations"]
    count, names = min(MOST, len(evaluations)), list(evaluations[0].images)
    chosen = [evaluations[round((i + 1) * len(evaluations) / count) - 1] for i in range(count)]
    figure = Figure((1.0 * count + 0.6, 1.98 * len(names) + 0.3))
    grid = figure.subplots(len(names), count, squeeze=False)
    for row, name in zip(grid, names, strict=True):
        for axes, evaluation in zip(row, chosen, strict=True):
            show(axes, evaluation.images[name][list(SHOWN)], 1)
        row[0].set_ylabel(name, color=colour(run, name))
    for axes, evaluation in zip(grid[0], chosen, strict=True):
        axes.set_title(f"step {evaluation.step:,}", color=FAINT, fontsize=9)
    return figure


def afterwards(run: Run) -> Figure:
    """The distance over the width of averages made after training; of those that were tracked, beside it."""
    results, figure = run["train"]["afterwards"], Figure((5.6, 3.5))
    axes = log_axes(figure, xlabel="width of the average, sigma_rel")
    axes.yaxis.set_minor_formatter(lambda value, _: f"{value:g}")
    axes.axhline(last(run).frechet[RAW], color=ORANGE, label="the weights themselves")
    axes.plot(*zip(*results["made"].items(), strict=True), "o-", color=BLUES[0], ms=4, label="made from snapshots")
    tracked = zip(*results["tracked"].items(), strict=True)
    axes.plot(*tracked, "o", color=BLUES[3], ms=11, mfc="none", mew=1.5, label="tracked in training")
    axes.legend(loc="best")
    return figure


def merges(run: Run) -> Figure:
    """The distance of the last weights, of merges of checkpoints, and of the best average."""
    results, figure = run["train"]["afterwards"], Figure((7.2, 2.6))
    width = min(results["tracked"], key=results["tracked"].__getitem__)
    rows = {"the last weights": last(run).frechet[RAW]}
    rows |= {f"merged: {name}": value for name, value in results["merges"].items()}
    rows[f"tracked average, sigma_rel {width:g}"] = results["tracked"][width]
    colours = [ORANGE, *[BLUES[0]] * len(results["merges"]), "#b4bac6"]
    axes = figure.add_subplot(xlabel="Fréchet distance", xlim=(0, 1.15 * max(rows.values())))
    bars = axes.barh(range(len(rows)), list(rows.values()), color=colours, height=0.6)
    axes.bar_label(bars, [f"{value:.3f}" for value in rows.values()], fontsize=9, padding=3)
    axes.set_yticks(range(len(rows)), list(rows))
    axes.invert_yaxis()
    axes.grid(visible=False, axis="y")
    return figure


# ---- words and tables


def ranks(count: int) -> str:
    return f"{count} rank" if count == 1 else f"{count} ranks"


def last(run: Run) -> Evaluation:
    return run["train"]["evaluations"][-1]


def is_equal(run: Run) -> bool:
    """What came back is what was saved: weights, and averages from the checkpoint and from their files."""
    saved, loaded, files = run["train"]["hashes"], run["resume"]["hashes"], run["resume"]["file_hashes"]
    return bool(saved == loaded and files == saved[:-1])


def result(run: Run) -> str:
    """The whole run in one sentence."""
    scores, real = last(run).frechet, sum(run["train"]["real"]) / len(run["train"]["real"])
    name = min((name for name in scores if name != RAW), key=scores.__getitem__, default=RAW)
    kept = f"digits drawn by the {name} are {scores[name]:.3f} from real ones, by the raw weights {scores[RAW]:.3f}"
    kept = kept if run["options"].use_ema else f"digits drawn by the weights are {scores[RAW]:.3f} from real ones"
    came = "came back bit for bit" if is_equal(run) else "did NOT come back as it was saved"
    here, there = ranks(run["options"].ranks), ranks(run["options"].resume_ranks)
    return (
        f"After {run['options'].steps:,} steps on {here}, {kept} (Fréchet distance, lower is better; real digits drawn "
        f"again: {real:.3f}); what was saved {came} on {there}."
    )


def words(run: Run, pictures: dict[str, str]) -> dict[str, str]:
    """The fields of page.html."""
    options, train, resume = run["options"], run["train"], run["resume"]
    on = [text for text in ("bf16", "activation_checkpointing") if getattr(options, f"use_{text}")]
    memory = [[key, f"{use['planned']:,}", f"{use['measured']:,}"] for key, use in train["memory"].items()]
    fields = {
        "title": "A diffusion model without averages",
        "result": result(run),
        "how": f"{train['parameters']:,} parameters, {options.shard} on {ranks(options.ranks)}"
        f"{', with '.join(['', *on])}; {options.steps:,} steps of {options.batch} images, "
        f"{1e3 * train['step_seconds']:.0f} ms each (median). The whole run took {run['seconds']:.0f} s.",
        "judge": f"{options.samples} samples against all real digits, in the last hidden layer of a classifier that "
        f"names {train['classifier'].accuracy:.1%} of held-out digits rightly.",
        "there": ranks(options.resume_ranks),
        "step": f"{resume['step']:,}",
        "hashes": table(["", "saved", "loaded", "from ema.save()", "before loading", "result"], compared(run)),
        "memory": table(["bytes of", "planned", "measured"], memory),
        "command": html.escape(run["command"]),
        "machine": html.escape(", ".join(f"{name} {value}" for name, value in machine().items())),
        **dict.fromkeys(("swap", "held", "made"), ""),
    }
    return {**pictures, **fields, **(words_of_averages(run, pictures) if options.use_ema else {})}


def words_of_averages(run: Run, pictures: dict[str, str]) -> dict[str, str]:
    """The fields of page.html that a run without averages leaves empty."""
    train = run["train"]
    snapshots = max(plan["snapshots"] for plan in train["afterwards"]["plans"].values())
    return {
        "title": "Averages of a sharded diffusion model",
        "swap": "They are put into the sharded model by <code>with ema.swapped(decay=...)</code>; after the block the "
        f"weights are back, bit for bit ({'checked in this run' if train['swap'] else 'NOT so in this run'}).",
        "held": f"Averages on each rank: {', '.join(f'{count / 1e6:.2f}' for count in train['bytes'])} MB; a full copy "
        f"on each would be {train['full_copy'] / 1e6:.2f} MB.",
        "made": "<h2>Averages after the fact</h2><p>Snapshots of two averages, of widths 0.05 and 0.1, were saved "
        f"during training; sums of {snapshots} of them are averages of other widths "
        "(<code>shardow.posthoc.synthesize()</code>). Three were tracked too, to compare. The last rows merge "
        f"{train['afterwards']['raw']} checkpoints of the weights (<code>shardow.merged()</code>).</p>"
        f'<div class="pair">{pictures["afterwards"]}{pictures["merges"]}</div>{table(*after(run))}',
    }


def after(run: Run) -> tuple[list[str], list[list[str]]]:
    """(head, rows): averages made after training, beside the same ones tracked where there are, and merges."""
    results, rows = run["train"]["afterwards"], []
    for width, distance in results["made"].items():
        plan, tracked = results["plans"][width], results["tracked"].get(width)
        cells = [f"{distance:.3f}", f"{tracked:.3f}" if tracked is not None else ""]
        rows.append([f"sigma_rel {width:g}", *cells, f"{plan['residual']:.2%}", f"{plan['variation']:.2%}"])
    rows += [[f"raw checkpoints: {name}", f"{value:.3f}", "", "", ""] for name, value in results["merges"].items()]
    return ["made afterwards", "Fréchet", "of the tracked one", "residual", "error promised, of a weight's span"], rows


def compared(run: Run) -> list[list[str]]:
    """Rows: each average, and the weights, before and after."""
    train, resume = run["train"], run["resume"]
    columns = [train["hashes"], resume["hashes"], [*resume["file_hashes"], ""], resume["before"]]
    rows = []
    for name, digests in zip([*list(last(run).frechet)[1:], RAW], zip(*columns, strict=True), strict=True):
        saved, loaded, file, _ = digests
        verdict = "equal" if saved == loaded == (file or saved) else "<strong>different</strong>"
        rows.append([name, *[f"<code>{digest[:12]}</code>" if digest else "" for digest in digests], verdict])
    return rows


def table(head: list[str], rows: list[list[str]]) -> str:
    cells = "</tr><tr>".join("".join(f"<td>{cell}</td>" for cell in row) for row in [head, *rows])
    return f'<div class="scroll"><table><tr>{cells}</tr></table></div>'


def machine() -> dict[str, str]:
    """Returns what figures depend on besides the options."""
    cpu = Path("/proc/cpuinfo")
    model = re.search(r"model name\s*: (.*)", cpu.read_text()) if cpu.exists() else None
    return {
        "processor": model[1] if model else platform.processor() or platform.machine(),
        "cores": str(len(os.sched_getaffinity(0))),
        **{module.__name__: module.__version__ for module in (shardow, torch, sklearn)},
        "python": platform.python_version(),
    }


def numbers(run: Run) -> dict[str, Any]:
    """Everything but the pictures, as JSON takes it."""
    parts = {name: {k: v for k, v in run[name].items() if k != "classifier"} for name in ("train", "resume")}
    for part in parts.values():
        part["evaluations"] = [{k: v for k, v in vars(e).items() if k != "images"} for e in part["evaluations"]]
    facts = {"command": run["command"], "options": run["options"].as_text(), "machine": machine()}
    return {**facts, "result": result(run), "seconds": run["seconds"], **parts}
