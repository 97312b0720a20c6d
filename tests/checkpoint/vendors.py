"""Checkpoints that the vendors' own functions write and read, from and into this toolkit's engines. Called on every rank.

Files of the vendors are made here for our readers, and files of our writers are opened here, so that neither is judged by our own code.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from queue import Queue
from typing import Any


def vendor_save(engine: Any, folder: Path) -> None:
    """DeepSpeed's ``save_checkpoint``, of ``DeepSpeedEngine`` and ``DeepSpeedPipelineEngine``: ``folder/latest`` and
    ``folder/global_stepN``."""
    assert engine._ds.save_checkpoint(str(folder))


def vendor_load(engine: Any, folder: Path, *, universal: bool = False) -> None:
    """DeepSpeed's ``load_checkpoint``, into an engine that nothing was loaded into yet.

    Args:
        universal: as a run has it with ``checkpoint.load_universal``.
    """
    engine._ds._config.load_universal_checkpoint = universal
    path, _ = engine._ds.load_checkpoint(str(folder))
    assert path is not None, f"DeepSpeed finds nothing in {folder}"


# ---- Megatron-core

ITERATION = "iter_{:07d}"
TRACKER = "latest_checkpointed_iteration.txt"


def vendor_save_megatron(
    engine: Any,
    folder: Path,
    step: int,
    *,
    sharding_type: str = "fully_reshardable",
    singleton: bool = False,
    **more: Any,
) -> None:
    """``megatron.core.dist_checkpointing.save`` of the ``sharded_state_dict`` of model and optimizer, as Megatron-LM's training loop
    calls it: ``folder/latest_checkpointed_iteration.txt`` and ``folder/iter_N``.

    Args:
        singleton: layers and experts one by one, in place of stacked.
        more: further entries of ``common.pt``: ``args``, for instance.
    """
    import torch.distributed as dist
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing.strategies import filesystem_async

    # It would start a process for a queue that this one alone reads and writes, which nobody ends where ranks are ended.
    filesystem_async._results_queue = Queue()
    iteration = folder / ITERATION.format(step)
    if dist.get_rank() == 0:
        iteration.mkdir(parents=True)
    dist.barrier()
    content = {
        "distrib_optim_sharding_type": sharding_type,
        "singleton_local_shards": singleton,
        "chained_optim_avoid_prefix": True,
    }
    engine._built.settle_weights()
    state = _sharded(engine, content, loading=False) | {"iteration": step, "checkpoint_version": 3.0, **more}
    dist_checkpointing.save(state, str(iteration), content_metadata=content)
    if dist.get_rank() == 0:
        (folder / TRACKER).write_text(str(step), encoding="utf-8")
    dist.barrier()


def vendor_load_megatron(engine: Any, folder: Path) -> None:
    """``megatron.core.dist_checkpointing.load``, into an engine that nothing was loaded into yet.

    Without Transformer Engine or Apex three things in Megatron-core 0.16 are wrong, and are put right around it here: the distributed
    optimizer asserts that its state exists before it is loaded, asks for each parameter's ``step`` among the tensors, and gives all
    parameters one ``step`` that each of them then advances.
    """
    from megatron.core import dist_checkpointing

    built = engine._built
    built.reset_state(0)
    iteration = str(folder / ITERATION.format(int((folder / TRACKER).read_text(encoding="utf-8"))))
    state = _sharded(engine, dist_checkpointing.load_content_metadata(iteration), loading=True)
    loaded = dist_checkpointing.load(state, iteration)
    for name, chunk in _chunks(engine).items():
        chunk.load_state_dict(loaded[name])
    with _steps_among_tensors():
        built.optimizer.load_state_dict(loaded["optimizer"])
    for master in built.state.masters:
        own = master.inner.state[master.tensor]
        own["step"] = own["step"].clone()


def _chunks(engine: Any) -> dict[str, Any]:
    """The bare models of this rank's stages, by their names in a checkpoint."""
    found = []
    for chunk in engine._built.chunks:
        while hasattr(chunk, "module"):
            chunk = chunk.module
        found.append(chunk)
    return {"model" if len(found) == 1 else f"model{number}": chunk for number, chunk in enumerate(found)}


def _sharded(engine: Any, content: dict[str, Any], *, loading: bool) -> dict[str, Any]:
    from megatron.core import parallel_state

    metadata = {**content, "dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True)}
    state = {name: chunk.sharded_state_dict(metadata=metadata) for name, chunk in _chunks(engine).items()}
    optimizer = engine._built.optimizer.sharded_state_dict(dict(state), is_loading=loading, metadata=metadata)
    return {**state, "optimizer": optimizer}


@contextmanager
def _steps_among_tensors() -> Iterator[None]:
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    original = DistributedOptimizer._set_main_param_and_optimizer_states

    def mended(self: Any, parameter: Any, tensors: dict[str, Any]) -> None:
        group, place = self.model_param_group_index_map[parameter]
        main = self.optimizer.param_groups[group]["params"][place]
        original(self, parameter, {**tensors, "step": self.optimizer.state[main]["step"]})

    DistributedOptimizer._set_main_param_and_optimizer_states = mended
    try:
        yield
    finally:
        DistributedOptimizer._set_main_param_and_optimizer_states = original
