"""What a command's configuration is made of: the schema, the file in conf/ that it begins with, and which
groups belong to it.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

from toolkit.config.cluster import KubernetesConfig
from toolkit.config.prepare import PrepareConfig
from toolkit.config.reshard import ReshardConfig
from toolkit.config.schema import RunConfig
from toolkit.config.sweep import SweepConfig


@dataclass(frozen=True, slots=True)
class ConfigRoot:
    """
    Attributes:
        kind: dataclass of the whole configuration.
        file: ``conf/<file>.yaml``, whose defaults list begins with ``schema``.
        groups: folders of conf/ that are groups of it; None: all of them, experiments too.
        open: keys below which settings are not the schema's: the engines' own, and the arguments of a user's
            module.
        short: sections that may be given a value, which is that of one of their keys: (section, key).
    """

    kind: type
    file: str
    schema: str
    groups: tuple[str, ...] | None
    open: tuple[str, ...] = ()
    short: tuple[tuple[str, str], ...] = ()


RUN = ConfigRoot(
    RunConfig,
    "config",
    "run_schema",
    groups=None,
    open=(
        "engine.deepspeed",
        "engine.megatron",
        "model.arguments",
        "data.sources",
        "cluster.slurm.options",
        *(
            f"cluster.kubernetes.{one.name}"
            for one in fields(KubernetesConfig)
            if one.default_factory is dict
        ),
    ),
)
PREPARE = ConfigRoot(
    PrepareConfig, "prepare", "prepare_schema", groups=(), short=(("import", "import_path"),)
)
RESHARD = ConfigRoot(
    ReshardConfig, "reshard", "reshard_schema", groups=("model",), short=(("target", "target.path"),)
)
SWEEP = ConfigRoot(SweepConfig, "sweep", "sweep_schema", groups=())
