"""Models of transformers without a family (``model.hf``): the module, its weights, its ``config.json``."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save
from torch import nn

from toolkit.checkpoint.formats.huggingface.source import open_state_dict
from toolkit.checkpoint.formats.huggingface.target import BufferFile
from toolkit.checkpoint.shard import WEIGHT, Box, Shard, TensorKey
from toolkit.config.recomputation import RecomputationMode
from toolkit.config.schema import Precision
from toolkit.errors import ConfigError, InputError, Problem
from toolkit.models.user_model import check_trainable, report_construction
from toolkit.plan.hugging_face import build_config, build_module, build_on_meta, find_class
from toolkit.plan.types import RunPlan

log = logging.getLogger(__name__)

DTYPES = {Precision.fp32: torch.float32, Precision.bf16: torch.bfloat16, Precision.fp16: torch.float16}


def build_skeleton(plan: RunPlan) -> nn.Module:
    """Build the module with parameters on the meta device and buffers on the CPU.

    Buffers have the dtype that transformers gives them in a model of the run's precision: rotary frequencies
    stay in fp32.

    Raises:
        PlanError: transformers cannot build it.
        ConfigError: it cannot be trained.
    """
    model = plan.config.model
    module: Any = build_on_meta(model, build_config(model), DTYPES[plan.config.precision.name])
    check_trainable(module, model.source_key, str(model.hf.architecture))
    if model.pretrained is not None:
        _load_buffers(plan, saved_buffers(module))
    if plan.config.train.recomputation.mode is not RecomputationMode.none:
        if not module.supports_gradient_checkpointing:
            raise ConfigError(
                Problem(
                    "train.activation_checkpointing",
                    f"train.activation_checkpointing={plan.config.train.activation_checkpointing}, "
                    f"model.hf.architecture={model.hf.architecture}",
                    f"{type(module).__name__} of transformers cannot recompute its activations",
                    "write train.activation_checkpointing=none",
                )
            )
        from toolkit.models.recomputation import enable_recomputation

        enable_recomputation(module, plan)
    return module


def build_with_random_weights(plan: RunPlan) -> nn.Module:
    """Build the whole module on the CPU in fp32, with weights drawn under ``train.seed``."""
    with torch.random.fork_rng(devices=[]), torch.device("cpu"), report_construction():
        torch.manual_seed(plan.config.train.seed)
        return build_module(plan.config.model, build_config(plan.config.model))


def load_module(plan: RunPlan) -> nn.Module:
    """Load ``model.pretrained`` whole on the CPU in fp32, as transformers does: it renames and converts the
    tensors of older releases. Parameters that the folder lacks, such as a new head, are drawn under
    ``train.seed``.

    Raises:
        InputError: the weights are missing, damaged or of other shapes.
    """
    model = plan.config.model
    assert model.pretrained is not None, "the plan has pretrained weights"
    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
        torch.manual_seed(plan.config.train.seed)
        try:
            module, loaded = find_class(model).from_pretrained(
                hub_folder(model.pretrained),
                config=build_config(model),
                dtype=torch.float32,
                use_safetensors=True,
                trust_remote_code=False,
                output_loading_info=True,
            )
        except (OSError, RuntimeError, ValueError) as error:
            why = " ".join(str(error).split())
            raise InputError(
                Problem(
                    "model.pretrained",
                    f"model.pretrained={model.pretrained}: {why:.300}",
                    "the folder has the weights of its config.json in safetensors files",
                    "undo changes in +model.hf.config, or download or export the folder again",
                )
            ) from error
    if loaded["missing_keys"]:
        log.warning(
            "%s has no weights for %s; they start with random weights of train.seed=%d",
            model.pretrained,
            ", ".join(sorted(loaded["missing_keys"])),
            plan.config.train.seed,
        )
    assert isinstance(module, nn.Module)
    return module


def hub_folder(name: str) -> Path:
    """Return the folder of ``name``, which is a folder or a hub id.

    Raises:
        InputError: it cannot be downloaded.
    """
    folder = Path(name).expanduser()
    return folder if folder.is_dir() else _download(name)


def _download(name: str) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(
            snapshot_download(
                name,
                allow_patterns=["config.json", "*.safetensors", "*.safetensors.index.json"],
                ignore_patterns=["*/*"],  # optimizer state, other formats
            )
        )
    except (HFValidationError, HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        why = str(error).splitlines()[0]
        raise InputError(
            Problem(
                "model.pretrained",
                f"model.pretrained={name}: no such folder, and the hub reports: {why}",
                "model.pretrained is a folder in Hugging Face's format with safetensors, or a hub id",
                "write model.pretrained=./folder or model.pretrained=organisation/model",
            )
        ) from error


def saved_buffers(module: nn.Module) -> dict[str, torch.Tensor]:
    """Return the buffers that belong to the state dict, such as the biases of a router's scores."""
    buffers = dict(module.named_buffers())
    return {name: buffers[name] for name in module.state_dict() if name in buffers}


def _load_buffers(plan: RunPlan, buffers: dict[str, torch.Tensor]) -> None:
    """Fill ``buffers`` from ``model.pretrained``."""
    if not buffers:
        return
    assert plan.config.model.pretrained is not None, "the plan has pretrained weights"
    saved = open_state_dict(hub_folder(plan.config.model.pretrained)).reader()
    keys = {name: TensorKey(WEIGHT, name) for name in buffers}
    if all(
        key in saved.tensors and saved.tensors[key].shape == tuple(buffers[name].shape)
        for name, key in keys.items()
    ):
        saved.read(
            [
                Shard(key, tuple(buffers[name].shape), Box.whole(tuple(buffers[name].shape)), buffers[name])
                for name, key in keys.items()
            ]
        )
        return
    loaded = dict(load_module(plan).named_buffers())
    for name, buffer in buffers.items():
        buffer.copy_(loaded[name])


def describe_export(plan: RunPlan) -> tuple[dict[str, Any], BufferFile | None]:
    """Return the ``config.json`` of an exported ``model.hf``, and the buffers of its state dict."""
    config, module = build_config(plan.config.model), build_skeleton(plan)
    buffers = {name: buffer.contiguous() for name, buffer in saved_buffers(module).items()}
    content = {
        **config.to_diff_dict(),
        "model_type": config.model_type,
        "architectures": [type(module).__name__],
    }
    return content, BufferFile(list(buffers), save(buffers, {"format": "pt"})) if buffers else None
