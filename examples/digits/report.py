"""The report: one HTML file that needs nothing beside it; the pictures as files, too, and every number in
results.json."""

from __future__ import annotations

import base64
import html
import json
import os
import platform
import re
from pathlib import Path
from string import Template
from typing import Any

from . import text
from .pictures import all_figures
from .theme import DARK, LIGHT, Run, png

WIDE = ("start", "growth")


def write(run: Run, out: Path) -> Path:
    """The path of report.html; pictures lie in figures/ beside it, those on dark ground in figures/dark/."""
    pictures = {name: (png(draw, run, LIGHT), png(draw, run, DARK)) for name, draw in all_figures(run).items()}
    folders = (out / "figures", out / "figures" / "dark")
    for i, folder in enumerate(folders):
        folder.mkdir(parents=True, exist_ok=True)
        for name, drawn in pictures.items():
            (folder / f"{name}.png").write_bytes(drawn[i])
    page = out / "report.html"
    page.write_text(compose(run, pictures), encoding="utf-8")
    (out / "results.json").write_text(json.dumps(numbers(run), indent=1) + "\n", encoding="utf-8")
    return page


def compose(run: Run, pictures: dict[str, tuple[bytes, bytes]]) -> str:
    shown = {name: figure(name, *pictures[name], caption) for name, caption in text.captions(run).items()}
    memory = [[key, f"{one['planned']:,}", f"{one['measured']:,}"] for key, one in run["train"]["memory"].items()]
    parts = {
        # where there are no averages
        **dict.fromkeys(("distance", "decay", "memory", "update_time", "afterwards", "merges"), ""),
        **shown, **text.words(run), "samples": "".join(shown[name] for name in shown if name.startswith("samples_")),
        "tiles": "".join('<div class="tile '
                         f'{kind}"><b>{number}</b><span>{words}</span></div>' for number, words,
                         kind in text.tiles(run)),
        "evaluations": table(*text.evaluations(run)),
        "afterwards_table": table(*text.afterwards(run)) if run["options"].use_ema else "",
        "plan_table": table(["bytes of", "planned", "measured"], memory),
        "resume_table": table(*text.comparisons(run)),
        "command": html.escape(run["command"]),
        "options": table(["option", "value"], [[f"--{name}", html.escape(value)] for name,
         value in run["options"].as_text().items()]),
        "machine": table(["machine", ""], [[name, html.escape(value)] for name, value in machine().items()]),
    }  # fmt: skip
    return Template((Path(__file__).parent / "page.html").read_text(encoding="utf-8")).substitute(parts)


def figure(name: str, light: bytes, dark: bytes, caption: str) -> str:
    on_light, on_dark = (f"data:image/png;base64,{base64.b64encode(picture).decode()}" for picture in (light, dark))
    picture = (
        f'<picture><source media="(prefers-color-scheme: dark)" srcset="{on_dark}">'
        f'<img src="{on_light}" alt="{html.escape(name.replace("_", " "))}"></picture>'
    )
    return (
        f'<figure class="{"wide" if name in WIDE else ""}" '
        f'id="{name}">{picture}<figcaption>{caption}</figcaption></figure>'
    )


def table(head: list[str], rows: list[list[str]]) -> str:
    """Columns whose cells are numbers stand to the right."""
    style = [
        'class="number"' if all(re.fullmatch(r"[\d.,% ]+", row[i]) for row in rows) else "" for i in range(len(head))
    ]

    def line(cells: list[str], tag: str) -> str:
        return "<tr>" + "".join(f"<{tag} {s}>{cell}</{tag}>" for cell, s in zip(cells, style, strict=True)) + "</tr>"

    return f"<table><thead>{line(head, 'th')}</thead><tbody>{''.join(line(row, 'td') for row in rows)}</tbody></table>"


def machine() -> dict[str, str]:
    """On what the figures were measured."""
    import sklearn
    import torch

    import shardow

    processor = (
        re.search(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text()) if Path("/proc/cpuinfo").exists() else None
    )
    return {
        "processor": processor[1] if processor else platform.processor() or platform.machine(),
        "cores": str(len(os.sched_getaffinity(0))),
        "memory": f"{os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES') / 2**30:.1f} GiB",
        "system": f"{platform.system()} {platform.machine()}",
        **{module.__name__: module.__version__ for module in (shardow, torch, sklearn)},
        "python": platform.python_version(),
    }


def numbers(run: Run) -> dict[str, Any]:
    """Everything but the pictures, as JSON takes it."""
    starts = run["starts"]
    above = {name: [one.peak - one.before for one in ranks] for name, ranks in starts["timelines"].items()}
    parts = {
        name: {key: value for key, value in run[name].items() if key != "classifier"} for name in ("train", "resume")
    }
    for part in parts.values():
        part["evaluations"] = [
            {key: value for key, value in vars(e).items() if key != "images"} for e in part["evaluations"]
        ]
    return {
        "command": run["command"], "options": run["options"].as_text(), "machine": machine(), "seconds": run["seconds"],
        **parts,
        "starts": {"parameters": starts["parameters"], "above": above},
    }  # fmt: skip
