"""Import what an engine needs before it is built: no process group and no CUDA context is created."""

from __future__ import annotations

import importlib

from toolkit.config.schema import EngineName
from toolkit.plan.types import RunPlan


def import_engine(plan: RunPlan) -> None:
    """Import the plan's engine, and the module of its model in transformers.

    A class of the user (``model.target``) is not imported: it may do more than define names.
    """
    device = plan.world.device
    match plan.config.engine.name:
        case EngineName.local:
            import toolkit.engine.local
        case EngineName.deepspeed:
            from toolkit.engine.deepspeed import patches

            patches.import_package(device)
            if plan.axes.pipeline > 1:
                import toolkit.engine.deepspeed.pipeline
                import toolkit.engine.deepspeed.pipeline_module
            else:
                import toolkit.engine.deepspeed.engine  # noqa: F401
        case EngineName.megatron:
            from toolkit.engine.megatron import engine

            engine.import_megatron(device)
    if plan.config.engine.name is not EngineName.megatron:
        _import_model(plan)


def _import_model(plan: RunPlan) -> None:
    from toolkit.families import get_family

    if plan.shape is not None:
        model_type = get_family(plan.shape.family).hugging_face_config(plan.shape)["model_type"]
    elif plan.config.model.target is None:
        model_type = plan.config.model.hf.model_type
    else:
        return
    from transformers import AutoModelForCausalLM  # noqa: F401 - the models are built with it
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES, model_type_to_module_name

    if model_type in CONFIG_MAPPING_NAMES:  # otherwise another package has the model
        name = model_type_to_module_name(model_type)
        importlib.import_module(f"transformers.models.{name}.modeling_{name}")
