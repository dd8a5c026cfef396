"""What rank 0 says on the terminal while it works."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

if TYPE_CHECKING:
    from .evaluate import Evaluation


class Show:
    """Says nothing on the other ranks."""

    def __init__(self, enabled: bool = True) -> None:
        self._console = Console(highlight=False, quiet=not enabled, soft_wrap=True)
        self._enabled = enabled
        self._headed = False

    def line(self, text: str) -> None:
        self._console.print(text)

    def evaluation(self, found: Evaluation) -> None:
        """One row of a table that grows while training goes on."""
        if not self._enabled:
            return
        if not self._headed:
            self._headed = True
            self.line("  [dim]Frechet distance of samples from the real digits (lower is better)[/]")
            self.line("  [dim]" + f"{'step':>6}" + "".join(f"{name:>16}" for name in found.frechet) + "[/]")
        best = min(found.frechet.values())
        cells = [f"[bold]{value:>16.3f}[/]" if value == best else f"{value:>16.3f}" for value in found.frechet.values()]
        self.line(f"  {found.step:>6}" + "".join(cells))

    @contextlib.contextmanager
    def progress(self, what: str, total: int) -> Iterator[Callable[..., None]]:
        """A bar on a terminal; nothing moves where the output is a file."""
        columns = (
            TextColumn("  {task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[loss]}"),
            TimeRemainingColumn(),
        )
        shown = self._enabled and self._console.is_terminal
        with Progress(*columns, console=self._console, transient=True, disable=not shown) as progress:
            task = progress.add_task(what, total=total, loss="")
            yield lambda loss=None: progress.update(task, advance=1, loss=f"loss {loss:.3f}" if loss is not None else "")
