"""What a command's configuration is made of: the schema, the file in conf/ that it begins with, and whether groups belong to it."""

from __future__ import annotations

from dataclasses import dataclass

from toolkit.config.prepare import PrepareConfig
from toolkit.config.schema import RunConfig


@dataclass(frozen=True, slots=True)
class Root:
    """
    Attributes:
        kind: dataclass of the whole configuration.
        file: ``conf/<file>.yaml``, whose defaults list begins with ``schema``.
        grouped: whether the folders of conf/ are groups of it. Without them it is keys only.
        open: keys below which settings are not the schema's: the engines' own, and the arguments of a user's module.
    """

    kind: type
    file: str
    schema: str
    grouped: bool
    open: tuple[str, ...] = ()


RUN = Root(RunConfig, "config", "run_schema", grouped=True, open=("engine.deepspeed", "engine.megatron", "model.arguments", "data.sources"))
PREPARE = Root(PrepareConfig, "prepare", "prepare_schema", grouped=False)
