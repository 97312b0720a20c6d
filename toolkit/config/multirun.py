"""Run Hydra's sweepers: turn the arguments after ``-m`` into batches of points, lists of overrides.

The sweeper is Hydra's basic sweeper or another installed one (``hydra/sweeper=optuna``). The launcher is
always hydra_plugins/toolkit_launcher.py; ``cluster=`` decides where points run.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from hydra import initialize_config_dir
from hydra._internal.callbacks import Callbacks
from hydra.core.config_loader import ConfigLoader
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Quote, QuotedString
from hydra.core.plugins import Plugins
from hydra.errors import HydraException
from hydra.types import HydraContext, RunMode
from omegaconf import open_dict
from omegaconf.errors import OmegaConfBaseException

import toolkit
from toolkit.config import mistakes, overrides, search_path
from toolkit.config.compose import compose_sweep, register
from toolkit.config.roots import RUN
from toolkit.config.sweep import SweepSection
from toolkit.errors import ConfigError, Problem

SWEEPERS = ("hydra/sweeper", "hydra.sweeper")  # Hydra's own group and section that may be overridden
LAUNCHER = "hydra/launcher"
OWN = ("run.dir", "monitor.group")  # keys that the sweep sets for its points


@dataclass(frozen=True, slots=True)
class SweepArguments:
    """The arguments of a sweep, by purpose.

    Attributes:
        options: ``--config-dir=FOLDER`` with an absolute path, if given.
        overrides: of the points, some with several values.
        fixed: keys of ``overrides`` with one value, as written before the ``=``.
        hydra: overrides of Hydra's sweeper.
        sweep: the section ``sweep``.
    """

    options: tuple[str, ...]
    overrides: tuple[str, ...]
    fixed: frozenset[str]
    hydra: tuple[str, ...]
    sweep: SweepSection

    @property
    def id(self) -> str:
        """Eight hex digits of the arguments that determine the points.

        The same arguments continue the same sweep.
        """
        text = "\0".join([*self.options, *self.overrides, *self.hydra])
        return hashlib.sha256(text.encode()).hexdigest()[:8]

    @property
    def name(self) -> str:
        """The name or experiment that all points have in common, else ``sweep``."""
        given = dict(
            word.lstrip("+").split("=", 1)
            for word in self.overrides
            if word.partition("=")[0] in self.fixed and "=" in word
        )
        name = given.get("run.name", given.get(search_path.EXPERIMENT, "sweep")).strip("'\"")
        return "".join(letter if letter.isalnum() or letter in "._-" else "-" for letter in name)

    @property
    def grid(self) -> bool:
        """Whether the arguments alone determine all points."""
        return not any(
            word.startswith(SWEEPERS[0] + "=") and word != f"{SWEEPERS[0]}=basic" for word in self.hydra
        )

    def swept(self, point: Sequence[str]) -> tuple[str, ...]:
        """Return the overrides of ``point`` that are not the same in all points."""
        return tuple(word for word in point if word.partition("=")[0] not in self.fixed)


def quoted(text: str | Path) -> str:
    """``text`` as a quoted value in Hydra's grammar."""
    return QuotedString(str(text), Quote.single).with_quotes()


def read_sweep(arguments: Sequence[str]) -> SweepArguments:
    """Parse the arguments of a sweep. Values of points are checked when the points are composed.

    Raises:
        ConfigError: an argument cannot be parsed, is not allowed for Hydra, or is a key that the sweep sets.
    """
    folders, rest = _folders([argument for argument in arguments if argument not in overrides.MULTIRUN])
    problems: list[Problem] = []
    of_points, of_hydra, of_sweep = list[str](), list[str](), list[str]()
    fixed: set[str] = set()
    for word in rest:
        name = word.partition("=")[0].lstrip("+~")
        if name == LAUNCHER:
            if word != f"{LAUNCHER}=toolkit":
                problems.append(
                    Problem(
                        name,
                        word,
                        "only cluster= decides where points run",
                        "leave it out, or write cluster=slurm",
                    )
                )
        elif name == SWEEPERS[0] or name.startswith((SWEEPERS[0] + "/", SWEEPERS[1] + ".")):
            of_hydra.append(word)
        elif name.startswith("sweep."):
            of_sweep.append(word)
        elif name in OWN[:1]:
            problems.append(
                Problem(
                    name,
                    word,
                    "each point has its own run directory in the sweep's folder",
                    "write sweep.dir=FOLDER",
                )
            )
        elif (override := _parsed(word, folders, problems)) is not None:
            of_points.append(word)
            # The last override of a key wins.
            (fixed.discard if override.is_sweep_override() else fixed.add)(override.get_key_element())
    try:
        sweep = compose_sweep(of_sweep)
    except ConfigError as error:
        problems += error.problems
    if problems:
        raise ConfigError(*problems)
    options = tuple(f"{overrides.CONFIG_DIR[0]}={folder}" for folder in folders[1:])
    return SweepArguments(options, tuple(of_points), frozenset(fixed), tuple(of_hydra), sweep)


def _folders(arguments: Sequence[str]) -> tuple[tuple[Path, ...], list[str]]:
    """Return the folders with groups, and the arguments without options that begin with a dash."""
    plain, own, problems = overrides.split_options(arguments)
    if problems:
        raise ConfigError(*problems)
    return search_path.folders(own), plain


def _parsed(word: str, folders: Sequence[Path], problems: list[Problem]) -> Any:
    try:
        return OverridesParser.create().parse_override(word)
    except HydraException as error:
        problems.append(mistakes.unreadable(word, error, folders))
        return None


# -- Hydra's sweeper


@dataclass(frozen=True, slots=True)
class BatchRunner:
    """Runs a batch of points for the launcher.

    The result has one entry per point: its metric, None if there is no metric and the sweeper does not need
    one, or an exception if the point failed, which the sweeper gets.
    """

    batch: Callable[[Sequence[tuple[str, ...]]], Sequence[float | Exception | None]]

    def __call__(self, points: Sequence[tuple[str, ...]]) -> Sequence[float | Exception | None]:
        return self.batch(points)


class _Loader:
    """Hydra's config loader without the sweeper's check of its points.

    The launcher composes each point itself and skips refused points.
    """

    def __init__(self, inner: Any) -> None:
        self._inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def load_sweep_config(self, master_config: Any, sweep_overrides: list[str]) -> Any:
        return master_config


def run_sweeper(arguments: SweepArguments, folder: Path, run_batch: BatchRunner) -> None:
    """Let the sweeper generate batches of points until it stops.

    Args:
        folder: folder for the sweeper's own files.

    Raises:
        ConfigError: the sweeper does not exist, or does not have a key.
        Exception: any exception of ``run_batch``.
    """
    sweeper = _sweeper(arguments, folder, run_batch)
    try:
        sweeper.sweep(arguments=list(arguments.overrides))
    except HydraException as error:
        raise ConfigError(_refused(arguments, error)) from error


def _sweeper(arguments: SweepArguments, folder: Path, run_batch: BatchRunner) -> Any:
    _register()
    register(RUN)
    own = [*arguments.hydra, f"{LAUNCHER}=toolkit", f"hydra.sweep.dir={quoted(folder)}"]
    try:
        with initialize_config_dir(str(search_path.ROOT), version_base="1.3"):
            hydra = GlobalHydra.instance().hydra
            assert hydra is not None
            config = hydra.compose_config(
                RUN.file, own, RunMode.MULTIRUN, with_log_configuration=False, from_shell=False
            )
            with open_dict(config):
                for section in [name for name in config if name != "hydra"]:
                    del config[section]  # defaults, which are not the points' configuration
            loader = cast(ConfigLoader, _Loader(hydra.config_loader))
            context = HydraContext(config_loader=loader, callbacks=Callbacks())
            return Plugins.instance().instantiate_sweeper(
                config=config, hydra_context=context, task_function=run_batch
            )
    except (HydraException, OmegaConfBaseException, ImportError) as error:
        raise ConfigError(_refused(arguments, error)) from error


def _register() -> None:
    """Register the launcher, which is in the folder that holds the package.

    Hydra finds it only if that folder was installed.
    """
    plugins, root = Plugins.instance(), str(Path(toolkit.__file__).resolve().parents[1])
    if root not in sys.path:
        sys.path.append(root)
    from hydra_plugins.toolkit_launcher import ToolkitLauncher

    plugins.register(ToolkitLauncher)


def _refused(arguments: SweepArguments, error: Exception) -> Problem:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return Problem(
        SWEEPERS[0],
        " ".join(arguments.hydra) or " ".join(arguments.overrides),
        f"the sweeper accepts these arguments ({' '.join(lines[:2])})",
        "correct hydra/sweeper= and hydra.sweeper.*, or leave them out for a grid; other sweepers are "
        "separate packages",
    )
