"""Save and load checkpoints with the vendors' own functions, from and into this toolkit's engines. Called on
every rank.

So neither our readers nor our writers are tested with our own code only.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from queue import Queue
from typing import Any


def vendor_save(engine: Any, folder: Path) -> None:
    """``save_checkpoint`` of DeepSpeed's engines: writes ``folder/latest`` and ``folder/global_stepN``."""
    assert engine._ds.save_checkpoint(str(folder))


def vendor_load(engine: Any, folder: Path, *, universal: bool = False) -> None:
    """DeepSpeed's ``load_checkpoint``, into a fresh engine.

    Args:
        universal: As in a run with ``checkpoint.load_universal``.
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
    """``megatron.core.dist_checkpointing.save`` of the ``sharded_state_dict`` of model and optimizer, as in
    Megatron-LM's training loop.

    Writes ``folder/latest_checkpointed_iteration.txt`` and ``folder/iter_N``.

    Args:
        singleton: Separate keys for layers and experts instead of stacked ones.
        **more: Further entries of ``common.pt``, such as ``args``.
    """
    import torch.distributed as dist
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing.strategies import filesystem_async

    # Otherwise it starts a process for a queue of this process, which keeps running when
    # ranks are ended.
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
    engine._model.wait_for_weights()
    state = _sharded(engine, content, loading=False) | {"iteration": step, "checkpoint_version": 3.0, **more}
    dist_checkpointing.save(state, str(iteration), content_metadata=content)
    if dist.get_rank() == 0:
        (folder / TRACKER).write_text(str(step), encoding="utf-8")
    dist.barrier()


def vendor_load_megatron(engine: Any, folder: Path) -> None:
    """``megatron.core.dist_checkpointing.load``, into a fresh engine.

    Works around three defects of Megatron-core 0.16 without Transformer Engine and Apex: the distributed
    optimizer asserts that its state exists before it is loaded, requests each parameter's ``step`` among the
    tensors, and gives all parameters one shared ``step`` that each of them advances.
    """
    from megatron.core import dist_checkpointing

    built = engine._model
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
    """The models of this rank's stages, by their names in a checkpoint."""
    found = []
    for chunk in engine._model.chunks:
        while hasattr(chunk, "module"):
            chunk = chunk.module
        found.append(chunk)
    return {"model" if len(found) == 1 else f"model{number}": chunk for number, chunk in enumerate(found)}


def _sharded(engine: Any, content: dict[str, Any], *, loading: bool) -> dict[str, Any]:
    from megatron.core import parallel_state

    metadata = {**content, "dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True)}
    state = {name: chunk.sharded_state_dict(metadata=metadata) for name, chunk in _chunks(engine).items()}
    optimizer = engine._model.optimizer.sharded_state_dict(dict(state), is_loading=loading, metadata=metadata)
    return {**state, "optimizer": optimizer}


@contextmanager
def _steps_among_tensors() -> Iterator[None]:
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    original = DistributedOptimizer._set_main_param_and_optimizer_states

    def patched(self: Any, parameter: Any, tensors: dict[str, Any]) -> None:
        group, place = self.model_param_group_index_map[parameter]
        main = self.optimizer.param_groups[group]["params"][place]
        original(self, parameter, {**tensors, "step": self.optimizer.state[main]["step"]})

    DistributedOptimizer._set_main_param_and_optimizer_states = patched
    try:
        yield
    finally:
        DistributedOptimizer._set_main_param_and_optimizer_states = original
