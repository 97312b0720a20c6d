"""DeepSpeed's universal checkpoints: each tensor whole, for any number of data and tensor ranks, at ZeRO 1, 2 and 3.

    PATH/latest_universal                                       the tag: global_step4_universal
    PATH/TAG/zero/NAME/{fp32,exp_avg,exp_avg_sq,step}.pt        a parameter
    PATH/TAG/zero/optimizer_state.pt                            what the optimizer has besides
    PATH/TAG/mp_rank_00_model_states.pt, zero_pp_rank_0_...     counts; stages 1 and 2 look for the one, stage 3 for the other

A run opens it with ``checkpoint.load_universal`` and ``engine.load_checkpoint(PATH)``. One folder serves all stages: ZeRO 3 takes
dictionaries with ``param`` too. The optimizer's settings are left out, so that each group keeps its own: ZeRO 3 would give those of the
first group to all (no-decay groups would decay).

What the loaders do wrong and files cannot mend is in ``NOTES``. Sources, in deepspeed 0.19.8: ``checkpoint/universal_checkpoint.py``,
``runtime/base_optimizer.py`` (``load_hp_checkpoint_state_from_checkpoint_dir``), ``runtime/zero/stage3.py``
(``load_hp_checkpoint_state_from_checkpoint_dir_stage3``). Imports no torch.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from toolkit import families
from toolkit.checkpoint import adam, manifest, states
from toolkit.checkpoint.catalog import Piece
from toolkit.checkpoint.formats import deepspeed_states, torch_zip
from toolkit.checkpoint.formats.deepspeed_states import VERSION
from toolkit.checkpoint.formats.pickles import Storage, StoredTensor
from toolkit.checkpoint.nearby import model_unknown
from toolkit.checkpoint.scalars import CONSUMED, LOSS_SCALER, WEIGHTS_DTYPE
from toolkit.checkpoint.shard import MASTER, WEIGHT, Box, TensorInfo, TensorKey
from toolkit.checkpoint.source import MODEL, Source
from toolkit.checkpoint.target import Target, TargetFile
from toolkit.config.reshard import TargetConfig
from toolkit.errors import CheckpointError
from toolkit.families.base import ParameterSpec
from toolkit.plan.deepspeed import tensor_dim

NAME = "universal"
NOTES = (
    "At ZeRO 3 DeepSpeed 0.19.8 gives all (sub-)groups one step counter, which torch's Adam then advances once for each of them. After "
    "load_checkpoint give each state a counter of its own: for state in engine.optimizer.optimizer.state.values(): "
    "state['step'] = state['step'].clone()",
    "At ZeRO 1 and 2 DeepSpeed 0.19.8 fails (IndexError) on a rank whose part of a group is all padding.",
)


def lay_out(source: Source, config: TargetConfig) -> Target:
    """Weights in fp32, as the optimizer has them, and Adam's state.

    Raises:
        InputError: the source does not say what model it is of.
        CheckpointError: it lacks Adam's state of a parameter, or holds another optimizer's.
    """
    if source.shape is None:
        raise model_unknown(source.folder)
    moments, steps = adam.moments(source, config), adam.steps(source)
    # Settings are not among what must be given: they are not written.
    wrong = list(adam.state_problems(source, moments, "target.format=deepspeed target.optimizer=false"))
    if wrong:
        raise CheckpointError(*wrong)
    assert steps is not None, "a source without a count was refused"
    dtype = states.weights_dtype(source, None)
    specs = families.get_family(source.shape.family).parameters(source.shape)
    tensors = {
        TensorKey(state, spec.name): TensorInfo("float32", spec.shape)
        for state in (WEIGHT if dtype == "float32" else MASTER, *moments)
        for spec in specs
    }
    step = source.step or 0
    folder = f"global_step{step}_universal"
    files = [_fixed("latest_universal", folder.encode()), *_counts(source, folder, steps, dtype, specs)]
    pieces: dict[TensorKey, tuple[Piece, ...]] = {}
    for key, info in tensors.items():
        storage = Storage("0", "float32", Box.whole(info.shape).numel)
        name = f"{folder}/zero/{key.name}/{'fp32' if key.state in (WEIGHT, MASTER) else key.state}.pt"
        content = {"param": StoredTensor.whole(storage, info.shape), "cat_dim": tensor_dim(key.name) or 0}
        layout = torch_zip.lay_out(name, content, [storage])
        begin = layout.storages["0"]
        files.append(layout.file)
        pieces[key] = (
            Piece(key, "float32", info.shape, Box.whole(info.shape), name, begin, begin + 4 * storage.numel),
        )
    files += [_counter(f"{folder}/zero/{spec.name}/step.pt", steps) for spec in specs]
    scalars = {key: value for key, value in source.catalog.scalars.items() if key != LOSS_SCALER}
    return Target(
        format=NAME,
        namespace=source.namespace,
        step=step,
        tensors=tensors,
        pieces=pieces,
        files=files,
        manifest=manifest.BESIDE,
        scalars=scalars | {MODEL: asdict(source.shape), WEIGHTS_DTYPE: dtype},
        identity=f"{source.shape} {moments} {step} {steps}",
        notes=NOTES,
    )


def _fixed(name: str, content: bytes) -> TargetFile:
    return TargetFile(name, len(content), {0: content})


def _counts(
    source: Source, folder: str, steps: int, dtype: str, specs: Sequence[ParameterSpec]
) -> list[TargetFile]:
    """The files of no parameter. ``dtype``: of the weights in the run that it comes from."""
    samples, step = source.catalog.scalars.get(CONSUMED), source.step or 0
    model: dict[str, Any] = {
        "module": {},
        "buffer_names": [],
        "optimizer": None,
        "param_shapes": [deepspeed_states.shapes(specs)],
        "lr_scheduler": deepspeed_states.scheduler(steps),
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
    # Groups are zipped with the run's: more are left over, none are missing. ZeRO 3 asks for the inner dictionary.
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
    """As torch's Adam counts: a tensor, of each parameter its own."""
    counter = _storage(steps)
    return torch_zip.lay_out(name, StoredTensor.whole(counter, ()), [counter]).file


def _storage(steps: int) -> Storage:
    return Storage("0", "float32", 1, content=struct.pack("<f", steps))
