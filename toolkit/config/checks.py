"""Checks of single values for ``__post_init__`` of the schemas. All raise ConfigError."""

from __future__ import annotations

from toolkit.errors import ConfigError, Problem


def check(holds: bool, key: str, value: object, rule: str, remedy: str) -> None:
    """Raise ConfigError unless ``holds``."""
    if not holds:
        raise ConfigError(Problem(key=key, seen=f"{key}={value}", rule=rule, remedy=remedy))


def at_most(section: str, most: float, **values: float | None) -> None:
    """Check that keys of ``section`` are null or at most ``most``."""
    for name, value in values.items():
        key = f"{section}.{name}"
        check(
            value is None or value <= most,
            key,
            value,
            f"{key} is at most {most}",
            f"write {key}={most} or less",
        )


def at_least(section: str, least: float, **values: float | None) -> None:
    """Check that keys of ``section`` (empty for the top level) are null or at least ``least``."""
    for name, value in values.items():
        key = f"{section}.{name}" if section else name
        check(
            value is None or value >= least,
            key,
            value,
            f"{key} is at least {least}",
            f"write {key}={least} or more",
        )
