"""Hydra's sweepers, outside the ranks: what a user typed after ``-m`` becomes batches of points, each of them
words for ``compose``.

The sweeper is Hydra's own, or another one that is installed (``hydra/sweeper=optuna``). The launcher is
hydra_plugins/toolkit_launcher.py, always: where points are carried out is chosen by ``cluster=``.
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

from toolkit.config import overrides, search
from toolkit.config.compose import compose_sweep, register
from toolkit.config.roots import RUN
from toolkit.config.sweep import SweepSection
from toolkit.errors import ConfigError, Problem

SWEEPERS = (
    "hydra/sweeper",
    "hydra.sweeper",
)  # what may be said of Hydra itself; the first has folders below it, the second keys
LAUNCHER = "hydra/launcher"
OWN = ("run.dir", "monitor.group")  # which a sweep gives its points


@dataclass(frozen=True, slots=True)
class SweepArguments:
    """
    Attributes:
        options: ``--config-dir=FOLDER``, absolute, if it was given.
        words: of the points, as typed: with several values where they are swept over.
        fixed: keys of ``words`` with one value, as typed before the ``=``.
        hydra: about Hydra's sweeper.
        sweep: the keys ``sweep.*``.
    """

    options: tuple[str, ...]
    words: tuple[str, ...]
    fixed: frozenset[str]
    hydra: tuple[str, ...]
    sweep: SweepSection

    @property
    def id(self) -> str:
        """Eight hex digits of what decides the points: the same words go on with the same sweep."""
        return hashlib.sha256("\0".join([*self.options, *self.words, *self.hydra]).encode()).hexdigest()[:8]

    @property
    def name(self) -> str:
        """For people: the run's name or experiment, where all points have the same."""
        given = dict(
            word.lstrip("+").split("=", 1)
            for word in self.words
            if word.partition("=")[0] in self.fixed and "=" in word
        )
        name = given.get("run.name", given.get(overrides.EXPERIMENT, "sweep")).strip("'\"")
        return "".join(letter if letter.isalnum() or letter in "._-" else "-" for letter in name)

    @property
    def grid(self) -> bool:
        """Whether all points are known from the words, without trying any."""
        return not any(
            word.startswith(SWEEPERS[0] + "=") and word != f"{SWEEPERS[0]}=basic" for word in self.hydra
        )

    def swept(self, point: Sequence[str]) -> tuple[str, ...]:
        """The words of a point in which points differ."""
        return tuple(word for word in point if word.partition("=")[0] not in self.fixed)


def quoted(text: str | Path) -> str:
    """As a value in Hydra's grammar, whatever is in it."""
    return QuotedString(str(text), Quote.single).with_quotes()


def is_sweep(arguments: Sequence[str]) -> bool:
    return not set(overrides.MULTIRUN).isdisjoint(arguments)


def read_sweep(arguments: Sequence[str]) -> SweepArguments:
    """What was typed, told apart. The values of points are checked when they are composed.

    Raises:
        ConfigError: a word that cannot be read, that Hydra's part may not have, or that a sweep gives its
            points itself.
    """
    folders, rest = _folders([argument for argument in arguments if argument not in overrides.MULTIRUN])
    problems: list[Problem] = []
    words, of_hydra, of_sweep = list[str](), list[str](), list[str]()
    fixed: set[str] = set()
    for word in rest:
        name = word.partition("=")[0].lstrip("+~")
        if name == LAUNCHER:
            if word != f"{LAUNCHER}=toolkit":
                problems.append(
                    Problem(
                        name,
                        word,
                        "where points are carried out is chosen by cluster= alone",
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
                    "each point has a run directory of its own, in the sweep's folder",
                    "write sweep.dir=FOLDER",
                )
            )
        elif (override := _parsed(word, folders, problems)) is not None:
            words.append(word)
            (fixed.discard if override.is_sweep_override() else fixed.add)(
                override.get_key_element()
            )  # the last one counts
    try:
        sweep = compose_sweep(of_sweep)
    except ConfigError as error:
        problems += error.problems
    if problems:
        raise ConfigError(*problems)
    options = tuple(f"{overrides.CONFIG_DIR[0]}={folder}" for folder in folders[1:])
    return SweepArguments(options, tuple(words), frozenset(fixed), tuple(of_hydra), sweep)


def _folders(arguments: Sequence[str]) -> tuple[tuple[Path, ...], list[str]]:
    """Where groups are found, and the words without the options that begin with a dash."""
    plain, own, problems = overrides.options(arguments)
    if problems:
        raise ConfigError(*problems)
    return search.folders(own), plain


def _parsed(word: str, folders: Sequence[Path], problems: list[Problem]) -> Any:
    try:
        return OverridesParser.create().parse_override(word)
    except HydraException as error:
        problems.append(overrides.unreadable(word, error, folders))
        return None


# -- Hydra's sweeper


@dataclass(frozen=True, slots=True)
class CarryOut:
    """What the launcher does with a batch of points: one number a point, to be compared; None: there is none
    and nobody needs it; an exception: the point failed, and the sweeper is told so.
    """

    batch: Callable[[Sequence[tuple[str, ...]]], Sequence[float | Exception | None]]

    def __call__(self, points: Sequence[tuple[str, ...]]) -> Sequence[float | Exception | None]:
        return self.batch(points)


class _Loader:
    """Hydra's own, but a sweeper's trial of its points says nothing: the launcher composes each of them once,
    and leaves out what is refused.
    """

    def __init__(self, inner: Any) -> None:
        self._inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def load_sweep_config(self, master_config: Any, sweep_overrides: list[str]) -> Any:
        return master_config


def run_sweeper(words: SweepArguments, folder: Path, carry_out: CarryOut) -> None:
    """Let the sweeper make points, batch by batch, until it has enough.

    Args:
        folder: where a sweeper leaves its own files.

    Raises:
        ConfigError: no such sweeper, or a key that it has not.
        Exception: whatever ``carry_out`` raises.
    """
    sweeper = _sweeper(words, folder, carry_out)
    try:
        sweeper.sweep(arguments=list(words.words))
    except HydraException as error:
        raise ConfigError(_refused(words, error)) from error


def _sweeper(words: SweepArguments, folder: Path, carry_out: CarryOut) -> Any:
    _register()
    register(RUN)
    own = [*words.hydra, f"{LAUNCHER}=toolkit", f"hydra.sweep.dir={quoted(folder)}"]
    try:
        with initialize_config_dir(str(search.ROOT), version_base="1.3"):
            hydra = GlobalHydra.instance().hydra
            assert hydra is not None
            config = hydra.compose_config(
                RUN.file, own, RunMode.MULTIRUN, with_log_configuration=False, from_shell=False
            )
            with open_dict(config):
                for section in [name for name in config if name != "hydra"]:
                    del config[section]  # of the defaults, which are not what points are
            loader = cast(ConfigLoader, _Loader(hydra.config_loader))
            context = HydraContext(config_loader=loader, callbacks=Callbacks())
            return Plugins.instance().instantiate_sweeper(
                config=config, hydra_context=context, task_function=carry_out
            )
    except (HydraException, OmegaConfBaseException, ImportError) as error:
        raise ConfigError(_refused(words, error)) from error


def _register() -> None:
    """Hydra finds the launcher by itself where it was installed. An installation from before it, or of the
    package alone, lacks it; it lies beside conf/.
    """
    plugins, root = Plugins.instance(), str(search.ROOT.parent)
    if root not in sys.path:
        sys.path.append(root)
    from hydra_plugins.toolkit_launcher import ToolkitLauncher

    plugins.register(ToolkitLauncher)


def _refused(words: SweepArguments, error: Exception) -> Problem:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return Problem(
        SWEEPERS[0],
        " ".join(words.hydra) or " ".join(words.words),
        f"the sweeper takes these words ({' '.join(lines[:2])})",
        "correct hydra/sweeper= and hydra.sweeper.*, or leave them out for a grid; other sweepers are "
        "packages to install",
    )
