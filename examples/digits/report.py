"""The report: one HTML file that needs nothing beside it; the pictures as files, too, and every number in results.json."""

from __future__ import annotations

import base64
import html
import json
from pathlib import Path
from string import Template
from typing import Any

from matplotlib import rc_context

from . import text
from .figures import Run
from .options import Options
from .pictures import all_figures
from .theme import DARK, FONT, LIGHT, png


def write(run: Run, out: Path) -> Path:
    """The path of report.html; pictures lie in figures/ beside it, those on dark ground in figures/dark/."""
    pictures = draw(run)
    for theme, folder in ((LIGHT, out / "figures"), (DARK, out / "figures" / "dark")):
        folder.mkdir(parents=True, exist_ok=True)
        for name in pictures:
            (folder / f"{name}.png").write_bytes(pictures[name][theme.name])
    page = out / "report.html"
    page.write_text(compose(run, pictures), encoding="utf-8")
    (out / "results.json").write_text(json.dumps(numbers(run), indent=1) + "\n", encoding="utf-8")
    return page


def draw(run: Run) -> dict[str, dict[str, bytes]]:
    """{name: {theme: PNG}}"""
    with rc_context(FONT):
        return {name: {theme.name: png(make(run, theme), theme) for theme in (LIGHT, DARK)} for name, make in all_figures(run).items()}


def compose(run: Run, pictures: dict[str, dict[str, bytes]]) -> str:
    options: Options = run["options"]
    captions = text.captions(run)
    shown = {name: figure(name, pictures[name], caption) for name, caption in captions.items()}
    grids = "".join(shown[name] for name in shown if name.startswith("samples_"))
    return Template((Path(__file__).parent / "page.html").read_text(encoding="utf-8")).substitute(
        {name: shown.get(name, "") for name in ("frechet", "distance", "loss", "decay", "memory", "update_time")},
        **text.headings(run),
        samples=grids,
        start=figure("start", pictures["start"], captions["start"], "wide"),
        growth=figure("growth", pictures["growth"], captions["growth"], "wide"),
        intro=text.intro(run),
        tiles="".join(tile(*each) for each in text.tiles(run)),
        samples_text=text.samples(run),
        growth_text=text.growth(run),
        evaluations=table(*text.evaluations(run)),
        plan_table=table(*text.planned(run)),
        resume_text=text.resume(run),
        resume_table=table(*text.comparisons(run)),
        command=html.escape(run["command"]),
        options=table(["option", "value"], [[f"--{name}", html.escape(value)] for name, value in options.as_text().items()]),
        machine=table(["machine", ""], [[name, html.escape(value)] for name, value in run["machine"].items()]),
    )


def figure(name: str, picture: dict[str, bytes], caption: str, kind: str = "") -> str:
    light, dark = (f"data:image/png;base64,{base64.b64encode(picture[theme.name]).decode()}" for theme in (LIGHT, DARK))
    source = f'<source media="(prefers-color-scheme: dark)" srcset="{dark}">'
    alternative = html.escape(name.replace("_", " "))
    picture_tag = f'<picture>{source}<img src="{light}" alt="{alternative}"></picture>'
    return f'<figure class="{kind}" id="{name}">{picture_tag}<figcaption>{caption}</figcaption></figure>'


def tile(number: str, words: str, kind: str = "") -> str:
    return f'<div class="tile {kind}"><b>{number}</b><span>{words}</span></div>'


def table(head: list[str], rows: list[list[str]]) -> str:
    """Columns whose cells are numbers stand to the right."""
    right = [all(_is_number(row[i]) for row in rows) for i in range(len(head))]
    style = ['class="number"' if r else "" for r in right]
    top = "".join(f"<th {s}>{cell}</th>" for cell, s in zip(head, style, strict=True))
    body = "".join("<tr>" + "".join(f"<td {s}>{cell}</td>" for cell, s in zip(row, style, strict=True)) + "</tr>" for row in rows)
    return f"<table><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table>"


def _is_number(cell: str) -> bool:
    return cell.replace(".", "").replace(",", "").replace("%", "").strip().isdigit()


def numbers(run: Run) -> dict[str, Any]:
    """Everything but the pictures, as JSON."""
    return {
        "command": run["command"],
        "options": run["options"].as_text(),
        "machine": run["machine"],
        "seconds": run["seconds"],
        "train": _plain(run["train"]),
        "resume": _plain(run["resume"]),
        "starts": {
            "parameters": run["starts"]["parameters"],
            "above": {name: [one.peak - one.before for one in ranks] for name, ranks in run["starts"]["timelines"].items()},
        },
    }


def _plain(part: dict[str, Any]) -> dict[str, Any]:
    kept = {name: value for name, value in part.items() if name not in ("classifier", "evaluations")}
    kept["evaluations"] = [{"step": e.step, "frechet": e.frechet, "named": e.named, "apart": e.apart} for e in part["evaluations"]]
    return kept
