"""The fields of Megatron-core's dataclasses that a user may name, read from their source: three sections, one a dataclass."""

from __future__ import annotations

from pathlib import Path

from toolkit.config.vendors.models import model
from toolkit.config.vendors.node import Node
from toolkit.config.vendors.source import Source

# section -> where in the package ``megatron`` its dataclass is; inherited fields (ModelParallelConfig's) are the heir's.
CLASSES = {
    "transformer": ("core/transformer/transformer_config.py", "TransformerConfig"),
    "ddp": ("core/distributed/distributed_data_parallel_config.py", "DistributedDataParallelConfig"),
    "optimizer": ("core/optimizer/optimizer_config.py", "OptimizerConfig"),
}


def read_schema(package: Path) -> Node:
    """The tree {transformer, ddp, optimizer} of the Megatron-core in ``package``, the folder ``megatron``. A name may stand in several."""
    source = Source(package)
    sections = {}
    for section, (path, name) in CLASSES.items():
        module = source.module(package / path)
        sections[section] = model(module, module.classes[name])
    return Node(fields=sections)
