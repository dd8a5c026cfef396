"""Makes what the package index shows lead to the repository: `python tools/wheel/links.py https://…/blob/v0.1.0`, in a
release's checkout.

The README's links are relative, which a page on an index can't follow, and pyproject.toml names no address, since the
sources know none.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

DOCUMENTATION = "docs/index.md"


def absolute(page: str, base: str) -> str:
    """The page with its links into the repository made absolute; pictures by their raw bytes."""

    def lead(found: re.Match[str]) -> str:
        picture, text, path = found.groups()
        return f"{picture}[{text}]({(base.replace('/blob/', '/raw/') if picture else base)}/{path})"

    return re.sub(r"(!?)\[([^\]]*)\]\((?!\w+:|#)([^)\s]+)\)", lead, page)


def addresses(base: str) -> str:
    return f'\n[project.urls]\nSource = "{base.split("/blob/")[0]}"\nDocumentation = "{base}/{DOCUMENTATION}"\n'


def main(base: str, root: Path) -> None:
    if not re.fullmatch(r"https://[^\s\"]+/blob/[^\s\"]+", base):
        raise SystemExit(f"{base!r} is no address of a version's files: https://host/owner/name/blob/version")
    readme, project = root / "README.md", root / "pyproject.toml"
    if "[project.urls]" in project.read_text():
        raise SystemExit(f"{project} has addresses already")
    readme.write_text(absolute(readme.read_text(), base))
    project.write_text(
        project.read_text().replace("\n[tool.scikit-build]\n", f"{addresses(base)}\n[tool.scikit-build]\n")
    )


if __name__ == "__main__":
    main(sys.argv[1], Path(__file__).resolve().parents[2])
