"""The configuration of each command: its schema, its file in conf/ and its groups."""

from __future__ import annotations

from dataclasses import dataclass, fields

from toolkit.config.cluster import KubernetesConfig
from toolkit.config.plan_arguments import PlanArguments
from toolkit.config.prepare import PrepareConfig
from toolkit.config.reshard import ReshardConfig
from toolkit.config.schema import RunConfig
from toolkit.config.sweep import SweepConfig


@dataclass(frozen=True, slots=True)
class ConfigRoot:
    """A command's configuration: its schema, file and groups.

    Attributes:
        kind: dataclass of the configuration.
        file: ``conf/<file>.yaml``, whose defaults list begins with ``schema``.
        groups: folders of conf/ that are its groups; None: all folders, including experiments.
        open: keys whose content is not part of the schema, such as engine keys and arguments of a user's
            module.
        short: (section, key): a value for the section is assigned to the key.
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
        "optim.arguments",
        "schedule.arguments",
        "model.hf.config",
        "task.arguments",
        "data.arguments",
        "hooks",
        "metrics",
        "monitor.sinks",
        "data.sources",
        "cluster.slurm.options",
        *(
            f"cluster.kubernetes.{field.name}"
            for field in fields(KubernetesConfig)
            if field.default_factory is dict
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
PLAN = ConfigRoot(PlanArguments, "plan", "plan_schema", groups=())
