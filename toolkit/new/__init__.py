"""Write a small project of the user: files of ``project/``, with its name in place of ``project_name``."""

from __future__ import annotations

import keyword
import sys
from pathlib import Path

from toolkit.errors import InputError, Problem

TEMPLATE = Path(__file__).parent / "project"
PLACEHOLDER = "project_name"


def create_project(folder: Path) -> list[Path]:
    """Write the project into ``folder``, whose last part is its name and that of its package.

    Returns:
        the files that were written, relative to ``folder``.

    Raises:
        InputError: the name is not that of a package, or a file exists; nothing has been written.
    """
    name = folder.name
    if problem := _name_problem(name):
        raise InputError(
            Problem("NAME", f"{folder}", problem, "choose a name of letters, digits and _: mine")
        )
    files = {
        _named(path.relative_to(TEMPLATE), name): path
        for path in sorted(TEMPLATE.rglob("*"))
        if path.is_file() and "__pycache__" not in path.parts
    }
    existing = [str(folder / file) for file in files if (folder / file).exists()]
    if existing:
        raise InputError(
            Problem(
                "NAME",
                f"{', '.join(existing[:3])}{', ...' if len(existing) > 3 else ''} exist",
                "files are never overwritten",
                "choose another name, or remove the files",
            )
        )
    for file, template in files.items():
        (folder / file).parent.mkdir(parents=True, exist_ok=True)
        (folder / file).write_text(
            template.read_text(encoding="utf-8").replace(PLACEHOLDER, name), encoding="utf-8"
        )
    return list(files)


def _named(template: Path, name: str) -> Path:
    return Path(*(name if part == PLACEHOLDER else part for part in template.parts))


def _name_problem(name: str) -> str | None:
    """Return the rule that a project's name breaks, or None."""
    if not name.isidentifier() or keyword.iskeyword(name) or not name.isascii():
        return "the name of a project is that of a Python package"
    taken = sys.stdlib_module_names | {"toolkit", "tests", "conf", "torch", "deepspeed", "megatron"}
    return "the name of a project is not that of another package" if name in taken else None
