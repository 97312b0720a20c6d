"""The configuration and the exact parameters of a model of transformers without a family (``model.hf``).

Everything else about such a model is unknown to the plan: activation memory, FLOPs, how to divide a layer.
This is the only part of planning that imports transformers and torch, and it does so only for these models;
it takes about five seconds.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import asdict, dataclass, fields
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from toolkit.config.kernels import AttentionKernel
from toolkit.config.model import HuggingFaceConfig, ModelConfig
from toolkit.errors import PlanError, Problem
from toolkit.families.base import ParameterSpec

if TYPE_CHECKING:
    import torch
    from torch import nn
    from transformers import PreTrainedConfig

EXAMPLE = "model.hf.model_type=phi3 +model.hf.config.hidden_size=64"
# Classes of language models that predict the next token, as transformers names them.
CAUSAL = ("ForCausalLM", "LMHeadModel")
READS_TOKENS = (*CAUSAL, "MaskedLM", "Seq2SeqLM")
# Fields of a config.json that are not of the architecture, or name code outside of transformers.
NOT_ARCHITECTURE = (
    "_attn_implementation",
    "_name_or_path",
    "architectures",
    "attn_implementation",
    "auto_map",
    "dtype",
    "experts_implementation",
    "model_type",
    "torch_dtype",
    "transformers_version",
)


@dataclass(frozen=True, slots=True)
class HuggingFaceModel:
    """The facts that a plan needs about a model.

    Attributes:
        parameters: as ``named_parameters`` lists them: tied parameters once, under their first name.
        vocab_size, max_position_embeddings: None if the configuration has no such field, or if the model is
            not a language model, where they may mean something else.
    """

    parameters: tuple[ParameterSpec, ...]
    vocab_size: int | None
    max_position_embeddings: int | None


def is_causal(model: ModelConfig) -> bool:
    """Return whether ``model.hf`` is a language model that predicts the next token."""
    return model.hf.architecture is not None and model.hf.architecture.endswith(CAUSAL)


def describe(model: ModelConfig) -> HuggingFaceModel:
    """Count the parameters of ``model.hf`` without allocating them.

    Raises:
        PlanError: transformers has no such class or configuration, or cannot build it.
    """
    return _describe(json.dumps(asdict(model.hf), sort_keys=True))


@lru_cache(maxsize=4)
def _describe(settings: str) -> HuggingFaceModel:
    model = ModelConfig(hf=HuggingFaceConfig(**json.loads(settings)))
    config = build_config(model)
    module = build_on_meta(model, config)
    text = config.get_text_config()
    reads_tokens = str(model.hf.architecture).endswith(READS_TOKENS)
    return HuggingFaceModel(
        tuple(
            ParameterSpec(name, tuple(parameter.shape), block_number(name))
            for name, parameter in module.named_parameters()
        ),
        *(_size(text, name) if reads_tokens else None for name in ("vocab_size", "max_position_embeddings")),
    )


def build_config(model: ModelConfig) -> PreTrainedConfig:
    """Build the configuration of ``model.hf`` in transformers.

    Raises:
        PlanError: there is no such model type, or its configuration refuses a field.
    """
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING, CONFIG_MAPPING_NAMES

    name = model.hf.model_type
    if name is None:
        raise PlanError(
            Problem(
                "model.hf.model_type",
                f"model.hf.architecture={model.hf.architecture}, and model.hf.model_type is null",
                "a model of transformers has a configuration: that of a folder, or one with random weights",
                f"write model.pretrained=FOLDER, or {EXAMPLE}",
            )
        )
    if name not in CONFIG_MAPPING_NAMES:
        raise PlanError(
            Problem(
                "model.hf.model_type",
                f"model.hf.model_type={name}",
                "a model type is one of transformers' own; code that comes with a model is never run",
                _closest("model.hf.model_type", name, CONFIG_MAPPING_NAMES),
            )
        )
    kind = CONFIG_MAPPING[name]
    values = {key: value for key, value in model.hf.config.items() if key not in NOT_ARCHITECTURE}
    if values.get("quantization_config") is not None:
        raise PlanError(
            Problem(
                "model.hf.config.quantization_config",
                "the model has a quantization_config",
                "weights are trained in precision.name, and quantized weights cannot be",
                "choose the model that it was quantized from",
            )
        )
    try:
        return kind(**deepcopy(values))
    except Exception as error:  # each class raises errors of its own
        raise _cannot_build(model, error) from error


def check_fields(model: ModelConfig, *, known: tuple[str, ...] = ()) -> None:
    """Refuse misspelt names in ``model.hf.config``, which transformers would accept and ignore.

    Args:
        known: further names, those in the ``config.json`` of ``model.pretrained``.

    Raises:
        PlanError: lists each unknown name.
    """
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING, CONFIG_MAPPING_NAMES

    if model.hf.model_type is None or model.hf.model_type not in CONFIG_MAPPING_NAMES:
        return  # build_config reports it
    kind: Any = CONFIG_MAPPING[model.hf.model_type]
    names = {field.name for field in fields(kind)} | {*kind.attribute_map, "num_labels", *known}
    wrong = [name for name in model.hf.config if name not in names or name in NOT_ARCHITECTURE]
    if wrong:
        raise PlanError(
            *(
                Problem(
                    f"model.hf.config.{name}",
                    f"model.hf.config.{name}={model.hf.config[name]}",
                    f"the configuration of {model.hf.model_type} in transformers has no such field",
                    _closest("+model.hf.config", name, names - {*NOT_ARCHITECTURE}, "=VALUE"),
                )
                for name in wrong
            )
        )


def build_on_meta(
    model: ModelConfig, config: PreTrainedConfig, dtype: torch.dtype | None = None
) -> nn.Module:
    """Build the module with parameters on the meta device and real buffers.

    Args:
        dtype: buffers are in the dtype that transformers gives them in a model of this dtype; fp32 by
            default.

    Raises:
        PlanError: the class does not exist or cannot be built.
    """
    with parameters_on_meta():
        return build_module(model, config, dtype)


def build_module(model: ModelConfig, config: PreTrainedConfig, dtype: torch.dtype | None = None) -> nn.Module:
    """Build the module of :func:`build_on_meta` with random weights from torch's random state."""
    import torch

    kind = find_class(model)
    if hasattr(config, "use_cache"):
        config.use_cache = False
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype or torch.float32)
    config.dtype = torch.get_default_dtype()
    if model.attention is not AttentionKernel.auto:
        flex = model.attention is AttentionKernel.flex
        config._attn_implementation = "flex_attention" if flex else model.attention.value
    try:
        module = kind.from_config(config) if hasattr(kind, "from_config") else kind(config)
    except Exception as error:  # of any type
        raise _cannot_build(model, error) from error
    finally:
        torch.set_default_dtype(before)
    assert isinstance(module, torch.nn.Module)
    return module


def find_class(model: ModelConfig) -> Any:
    """Return the class ``model.hf.architecture`` of transformers.

    Raises:
        PlanError: transformers has no such class.
    """
    import transformers

    name = model.hf.architecture
    assert name is not None, "the model is of model.hf"
    is_name = name.isidentifier() and name[0].isupper()
    found = getattr(transformers, name, None) if is_name else None
    if not isinstance(found, type) or not _is_model(found):
        names = [
            name for name in dir(transformers) if name.startswith("AutoModelFor") or name.endswith(CAUSAL)
        ]
        raise PlanError(
            Problem(
                "model.hf.architecture",
                f"model.hf.architecture={name}",
                "it is a model class of transformers; code that comes with a model is never run",
                _closest("model.hf.architecture", name, names),
            )
        )
    return found


def _is_model(found: type) -> bool:
    from transformers import PreTrainedModel

    return issubclass(found, PreTrainedModel) or hasattr(found, "from_config")


@contextmanager
def parameters_on_meta() -> Iterator[None]:
    """Create parameters on the meta device and buffers on real devices.

    Under ``torch.device("meta")`` buffers such as rotary frequencies would be lost.
    """
    from torch import nn
    from torch.nn.modules.module import register_module_parameter_registration_hook

    def on_meta(module: nn.Module, name: str, parameter: nn.Parameter) -> nn.Parameter:
        if parameter.is_meta:  # a parameter that is being tied stays the same object
            return parameter
        return nn.Parameter(parameter.detach().to("meta"), requires_grad=parameter.requires_grad)

    # torch registers what the hook returns, although its annotation has no return value.
    hook = register_module_parameter_registration_hook(on_meta)  # type: ignore[arg-type]
    try:
        yield
    finally:
        hook.remove()


def block_number(name: str) -> int | None:
    """Return the number of a block: the first number in the name of its parameters."""
    found = re.search(r"\.(\d+)\.", name)
    return None if found is None else int(found[1])


def _size(config: PreTrainedConfig, name: str) -> int | None:
    value = getattr(config, name, None)
    return value if isinstance(value, int) and value > 0 else None


def _closest(key: str, name: str, names: Any, suffix: str | None = None) -> str:
    close = difflib.get_close_matches(name, sorted(names), 1, 0.6)
    if not close:
        return (
            "correct the name, or leave it out" if suffix else f"write {key}=NAME with a name of transformers"
        )
    return f"write {key}.{close[0]}{suffix}" if suffix else f"write {key}={close[0]}"


def _cannot_build(model: ModelConfig, error: Exception) -> PlanError:
    why = " ".join(str(error).split())
    return PlanError(
        Problem(
            "model.hf.config",
            f"model.hf.architecture={model.hf.architecture}, model.hf.model_type={model.hf.model_type}: "
            f"{type(error).__name__}: {why:.300}",
            "transformers can build the model from its configuration",
            "correct the fields of the configuration: +model.hf.config.NAME=VALUE"
            + ("" if model.attention is AttentionKernel.auto else ", or leave out model.attention"),
        )
    )
