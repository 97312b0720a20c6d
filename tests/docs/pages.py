"""The fenced blocks of README.md, CONTRIBUTING.md and docs/, and the commands in them."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGES = [
    ROOT / "README.md",
    *sorted(path for path in (ROOT / "docs").rglob("*.md")),
    *(path for path in [ROOT / "CONTRIBUTING.md"] if path.exists()),
]
_BLOCK = re.compile(
    r"^(?P<file><!-- file: (?P<name>\S+) -->\n+)?"
    r"(?P<fence>```+)(?P<language>[^\s`]*)[^\n]*\n(?P<text>.*?)^(?P=fence)[ \t]*$",
    re.MULTILINE | re.DOTALL,
)
_LAUNCHERS = {"python", "deepspeed", "torchrun"}


@dataclass(frozen=True)
class Block:
    """A fenced block.

    Attributes:
        language: the word behind the opening fence.
        line: the line number of the opening fence.
        file: the name under which the reader saves the block (``<!-- file: NAME -->`` before it).
    """

    page: str
    line: int
    language: str
    text: str
    file: str | None = None

    @property
    def id(self) -> str:
        return f"{self.page}:{self.line}"


@dataclass(frozen=True)
class Command:
    """One shell command, with continuation lines joined and comments removed."""

    block: Block
    text: str

    @property
    def id(self) -> str:
        return f"{self.block.id}: {self.text}"

    @property
    def argv(self) -> list[str]:
        return shlex.split(self.text, comments=True)

    def launch(self) -> tuple[str, list[str]] | None:
        """The script in launch/, its arguments and the number of ranks; None for other commands."""
        argv = self.argv
        if argv[:1] == ["dmt"] and len(argv) > 1 and not argv[1].startswith("-"):
            return argv[1], argv[2:]
        script = next((i for i, word in enumerate(argv) if re.fullmatch(r"launch/\w+\.py", word)), None)
        if not argv or argv[0] not in _LAUNCHERS or script is None:
            return None
        ranks = next(
            (
                argv[i + 1]
                for i, word in enumerate(argv[:script])
                if word in ("--num_gpus", "--nproc_per_node")
            ),
            None,
        )
        extra = [f"cluster.cpu_ranks={ranks}"] if ranks and "--frozen" not in self.text else []
        return Path(argv[script]).stem, argv[script + 1 :] + extra


def read_blocks(text: str, page: str) -> list[Block]:
    """Every fenced block of a page, in order."""
    return [
        Block(
            page,
            text[: match.start("fence")].count("\n") + 1,
            match["language"],
            match["text"],
            match["name"],
        )
        for match in _BLOCK.finditer(text)
    ]


def blocks_of(page: Path) -> list[Block]:
    return read_blocks(page.read_text(encoding="utf-8"), str(page.relative_to(ROOT)))


def commands_of(block: Block) -> list[Command]:
    """The commands of a shell block."""
    lines = block.text.replace("\\\n", " ").splitlines()
    return [Command(block, line.strip()) for line in lines if line.strip() and not line.startswith("#")]


ALL_BLOCKS = [block for page in PAGES for block in blocks_of(page)]
COMMANDS = [
    command
    for block in ALL_BLOCKS
    if block.language == "sh" and not block.file
    for command in commands_of(block)
]
