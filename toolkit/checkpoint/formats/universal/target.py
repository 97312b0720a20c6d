"""Write DeepSpeed's universal checkpoints: each tensor whole, for any number of data and tensor ranks, at
ZeRO 1, 2 and 3.

    PATH/latest_universal                                       the tag: global_step4_universal
    PATH/TAG/zero/NAME/{fp32,exp_avg,exp_avg_sq,step}.pt        a parameter
    PATH/TAG/zero/optimizer_state.pt                            the rest of the optimizer's state
    PATH/TAG/mp_rank_00_model_states.pt, zero_pp_rank_0_...     counts, for stages 1 and 2 and for stage 3

A run loads it with ``checkpoint.load_universal`` and ``engine.load_checkpoint(PATH)``. ZeRO 3 accepts
dictionaries with ``param`` too, so one folder serves all stages. Optimizer settings are left out so that each
group keeps its own: ZeRO 3 would give all groups those of the first, and parameters without weight decay
would decay.

This format does not replace ``deepspeed/target.py``: it has no ZeRO 0, pipelines, 16-bit weights, optimizer
settings or weights without Adam's state, and DeepSpeed's loader has the defects in ``NOTES``.

Sources, in deepspeed 0.19.8: ``checkpoint/universal_checkpoint.py``, ``runtime/base_optimizer.py``
(``load_hp_checkpoint_state_from_checkpoint_dir``), ``runtime/zero/stage3.py``
(``load_hp_checkpoint_state_from_checkpoint_dir_stage3``). Imports no torch.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from toolkit import families
from toolkit.checkpoint import adam, manifest, target_tensors
from toolkit.checkpoint.catalog import TensorPiece
from toolkit.checkpoint.formats import torch_zip
from toolkit.checkpoint.formats.deepspeed.target_state import VERSION, parameter_shapes, scheduler_state
from toolkit.checkpoint.formats.stored_tensor import Storage, StoredTensor
from toolkit.checkpoint.model_discovery import unknown_model_error
from toolkit.checkpoint.scalars import CONSUMED, LOSS_SCALER, WEIGHTS_DTYPE
from toolkit.checkpoint.shard import MASTER, WEIGHT, Box, TensorInfo, TensorKey
from toolkit.checkpoint.source import MODEL, CheckpointSource
from toolkit.checkpoint.target import CheckpointTarget, TargetFile
from toolkit.config.reshard import TargetConfig
from toolkit.errors import CheckpointError
from toolkit.families.base import ParameterSpec
from toolkit.plan.deepspeed import tensor_parallel_dim

NAME = "universal"
NOTES = (
    "At ZeRO 3 DeepSpeed 0.19.8 shares one step counter among all (sub-)groups, and torch's Adam advances "
    "it once for each. After "
    "load_checkpoint, give each state its own counter: for state in "
    "engine.optimizer.optimizer.state.values(): "
    "state['step'] = state['step'].clone()",
    "At ZeRO 1 and 2 DeepSpeed 0.19.8 fails (IndexError) on a rank whose partition of a group is only "
    "padding.",
)


def lay_out(source: CheckpointSource, config: TargetConfig) -> CheckpointTarget:
    """Lay out fp32 weights and Adam's state.

    Raises:
        UnknownModelError: The source does not describe its model.
        CheckpointError: Adam's state of a parameter is missing, or the state is of another optimizer.
    """
    if source.shape is None:
        raise unknown_model_error(source.folder)
    moments, steps = adam.moment_states(source, config), adam.step_count(source)
    # Optimizer settings are not required, because they are not written.
    wrong = list(adam.find_state_problems(source, moments, "target.format=deepspeed target.optimizer=false"))
    if wrong:
        raise CheckpointError(*wrong)
    assert steps is not None, "find_state_problems requires a step count"
    dtype = target_tensors.choose_weights_dtype(source, None)
    specs = families.get_family(source.shape.family).parameters(source.shape)
    tensors = {
        TensorKey(state, spec.name): TensorInfo("float32", spec.shape)
        for state in (WEIGHT if dtype == "float32" else MASTER, *moments)
        for spec in specs
    }
    step = source.step or 0
    folder = f"global_step{step}_universal"
    files = [_fixed("latest_universal", folder.encode()), *_counts(source, folder, steps, dtype, specs)]
    pieces: dict[TensorKey, tuple[TensorPiece, ...]] = {}
    for key, info in tensors.items():
        storage = Storage("0", "float32", Box.whole(info.shape).numel)
        name = f"{folder}/zero/{key.name}/{'fp32' if key.state in (WEIGHT, MASTER) else key.state}.pt"
        content = {
            "param": StoredTensor.whole(storage, info.shape),
            "cat_dim": tensor_parallel_dim(key.name) or 0,
        }
        layout = torch_zip.lay_out(name, content, [storage])
        begin = layout.storages["0"]
        files.append(layout.file)
        pieces[key] = (
            TensorPiece(
                key, "float32", info.shape, Box.whole(info.shape), name, begin, begin + 4 * storage.numel
            ),
        )
    files += [_counter(f"{folder}/zero/{spec.name}/step.pt", steps) for spec in specs]
    scalars = {key: value for key, value in source.catalog.scalars.items() if key != LOSS_SCALER}
    return CheckpointTarget(
        format=NAME,
        namespace=source.namespace,
        step=step,
        tensors=tensors,
        pieces=pieces,
        files=files,
        manifest=manifest.FOREIGN_NAME,
        scalars=scalars | {MODEL: asdict(source.shape), WEIGHTS_DTYPE: dtype},
        identity=f"{source.shape} {moments} {step} {steps}",
        notes=NOTES,
    )


def _fixed(name: str, content: bytes) -> TargetFile:
    return TargetFile(name, len(content), {0: content})


def _counts(
    source: CheckpointSource, folder: str, steps: int, dtype: str, specs: Sequence[ParameterSpec]
) -> list[TargetFile]:
    """Return the files that belong to no parameter. ``dtype`` is that of the weights in the source's run."""
    samples, step = source.catalog.scalars.get(CONSUMED), source.step or 0
    model: dict[str, Any] = {
        "module": {},
        "buffer_names": [],
        "optimizer": None,
        "param_shapes": [parameter_shapes(specs)],
        "lr_scheduler": scheduler_state(steps),
        "data_sampler": None,
        "random_ltd": None,
        "skipped_steps": step - steps,
        "global_steps": step,
        "global_samples": samples if isinstance(samples, int) else 0,
        "dp_world_size": 1,
        "mp_world_size": 1,
        "ds_config": {"bf16": {"enabled": dtype == "bfloat16"}, "fp16": {"enabled": dtype == "float16"}},
        "ds_version": VERSION,
    }
    counter = _storage(steps)
    # DeepSpeed zips the groups with the run's, so there may be more but not fewer. ZeRO 3 needs the inner
    # dictionary.
    group: dict[str, Any] = {"params": [0]}
    optimizer = {
        "ds_version": VERSION,
        "param_groups": [group, group],
        "optimizer_state_dict": {
            "state": {0: {"step": StoredTensor.whole(counter, ())}},
            "param_groups": [group],
        },
    }
    names = ("mp_rank_00_model_states.pt", "zero_pp_rank_0_mp_rank_00_model_states.pt")
    return [
        *(torch_zip.lay_out(f"{folder}/{name}", model, []).file for name in names),
        torch_zip.lay_out(f"{folder}/zero/optimizer_state.pt", optimizer, [counter]).file,
    ]


def _counter(name: str, steps: int) -> TargetFile:
    """Return a file with the step count as torch's Adam stores it: one tensor per parameter."""
    counter = _storage(steps)
    return torch_zip.lay_out(name, StoredTensor.whole(counter, ()), [counter]).file


def _storage(steps: int) -> Storage:
    return Storage("0", "float32", 1, content=struct.pack("<f", steps))
