"""Print the story: each command, what is checked with numbers, and a final table."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TextIO

from tests.launch.processes import BIN, ROOT, RunningCommand
from toolkit.progress import duration


class StoryFailed(Exception):
    """A check of the story failed."""


@dataclass
class Row:
    title: str
    seconds: float = 0.0
    seen: list[str] = field(default_factory=list)
    failed: bool = False


class Story:
    """The steps of the story.

    Args:
        folder: of the story; outputs of commands are in ``folder/log``.
        environ: environment of every command.
    """

    def __init__(self, folder: Path, environ: Mapping[str, str], out: TextIO = sys.stdout) -> None:
        self.folder, self.environ, self.rows, self._out = folder, dict(environ), list[Row](), out

    def print(self, text: str) -> None:
        print(text, file=self._out, flush=True)

    @contextmanager
    def step(self, title: str) -> Iterator[None]:
        row = Row(title)
        self.rows.append(row)
        self.print(f"\n== {len(self.rows)}. {title}")
        began = time.monotonic()
        try:
            yield
        except BaseException as error:
            row.failed = True
            row.seen = [f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"]
            raise
        finally:
            row.seconds = time.monotonic() - began

    def saw(self, text: str) -> None:
        """Part of the step's line in the table."""
        self.rows[-1].seen.append(text)
        self.print(f"   {text}")

    def check(self, holds: bool, text: str) -> None:
        """Record a checked fact. Raises StoryFailed if it does not hold."""
        if not holds:
            raise StoryFailed(f"check failed: {text}")
        self.saw(text)

    def typed(self, argv: Sequence[str], where: str = "") -> None:
        """Format a command for users, without the folders that all commands share."""
        words = " ".join(f"'{word}'" if " " in word else word for word in argv)
        for long in (f"{self.folder}{os.sep}", f"{ROOT}{os.sep}", f"{BIN}{os.sep}"):
            words = words.replace(long, "")
        self.print(f"   {where}$ {words}")

    def run(self, name: str, argv: Sequence[str], *, seconds: float = 240) -> str:
        """Run the command and return its output. It must succeed in time."""
        self.typed(argv)
        log = self.folder / "log" / name
        log.mkdir(parents=True)
        with RunningCommand(argv, self.folder / name, cwd=log, environ=self.environ) as started:
            code = started.wait_for_exit(seconds)
            started.wait_until_gone()
            if code:
                raise StoryFailed(f"exit code {code} of: {' '.join(argv)}\n{started.output}")
            return started.output

    def table(self) -> str:
        """One line per step; observations continue in the lines below it."""
        titles = [f"{number}. {row.title}" for number, row in enumerate(self.rows, 1)]
        width, total = max(map(len, titles), default=0), sum(row.seconds for row in self.rows)
        lines = []
        for title, row in zip(titles, self.rows, strict=True):
            for place, seen in enumerate(row.seen or [""]):
                head = f"{title:<{width}} {row.seconds:6.1f} s" if place == 0 else f"{'':<{width + 9}}"
                lines.append(f"{head}  {'FAILED: ' * row.failed}{seen}".rstrip())
        return "\n".join([*lines, f"{'total':<{width}} {total:6.1f} s  ({duration(total)})"])
