"""Rules about the model: where it comes from, and whether it fits the data."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields

from toolkit.config.data import DocumentMasking
from toolkit.config.model import ModelConfig
from toolkit.config.recomputation import RecomputationMode
from toolkit.config.schema import TrainConfig
from toolkit.errors import Problem
from toolkit.plan.hugging_face import is_causal
from toolkit.plan.rule_context import Rule, RuleContext, make_error, make_warning


def a_model_has_one_source(ctx: RuleContext) -> Iterator[Problem]:
    model = ctx.config.model
    if model.arguments and model.target is None:
        yield Problem(
            "model.arguments",
            f"model.arguments has {', '.join(model.arguments)}",
            "arguments belong to model.target",
            "write model=custom model.target=my.package.Model, or leave model.arguments out",
        )
    if model.hf.architecture is None and (model.hf.config or model.hf.model_type is not None):
        yield Problem(
            "model.hf.architecture",
            "model.hf.architecture is null, and model.hf has other keys",
            "a model of transformers is built by one of its classes",
            "write model=huggingface, or model.hf.architecture=AutoModelForCausalLM",
        )
    if model.target is not None and "." not in model.target:
        yield make_error(
            ctx.config,
            "model.target",
            "a model is given by its dotted path: module and class",
            "write model.target=my.package.Model",
        )
    if ctx.of_a_family:
        return
    key = model.source_key
    others = {
        "model.family": model.family,
        "model.pretrained": model.pretrained if key == "model.target" else None,
        "model.hf.architecture": model.hf.architecture if key == "model.target" else None,
    }
    given = [name for name, value in others.items() if value is not None]
    if given:
        yield make_error(
            ctx.config,
            " ".join([key, *given]),
            "a model has one source",
            "write model=custom model.target=my.package.Model, or leave model.target out"
            if key == "model.target"
            else "leave model.family out, or write model.hf.architecture=null",
        )
    else:
        yield from _sizes_belong_to_a_family(ctx)


def _sizes_belong_to_a_family(ctx: RuleContext) -> Iterator[Problem]:
    """Warn about sizes without effect. It is no error, because an experiment may set them for a family."""
    model = ctx.config.model
    sources = ("family", "target", "arguments", "pretrained", "hf", "attention")
    given = {
        each.name: value
        for each in fields(ModelConfig)
        if each.name not in sources and (value := getattr(model, each.name)) != each.default
    }
    if given:
        sizes = " ".join(f"{ctx.size_key(name)}={value}" for name, value in given.items())
        yield make_warning(
            ctx.config,
            " ".join([*(f"model.{name}" for name in given), model.source_key]),
            "the sizes in this section are those of a family, and have no effect on another model",
            f"leave them out, or write {sizes} instead of them",
        )


def models_without_a_family(ctx: RuleContext) -> Iterator[Problem]:
    config, key = ctx.config, ctx.config.model.source_key
    if ctx.of_a_family:
        return
    if config.train.recomputation.mode is not RecomputationMode.none and config.model.target is not None:
        yield make_error(
            config,
            "train.activation_checkpointing model.target",
            "a model of your own decides itself what to recompute",
            "leave out train.activation_checkpointing, and call torch.utils.checkpoint in the model",
        )
    if config.monitor.prompt is not None:
        yield make_warning(
            config,
            f"monitor.prompt {key}",
            "only the families' models can continue a text",
            "write monitor.prompt=null",
        )
    if config.data.documents is DocumentMasking.separate and key == "model.hf.architecture":
        yield make_error(
            config,
            f"data.documents {key}",
            "only the families' models are known to separate documents by position_ids",
            "write data.documents=joined",
        )


# Ends of names of transformers' classes -> a task of the toolkit for them.
TASKS = {
    "MaskedLM": "MaskedLanguageModelTask +task.arguments.mask_token=ID +task.arguments.vocab_size=ROWS",
    "ConditionalGeneration": "SequenceToSequenceTask",
    "Seq2SeqLM": "SequenceToSequenceTask",
    "Classification": "ClassificationTask",
}


def other_models_have_a_task(ctx: RuleContext) -> Iterator[Problem]:
    config, hf = ctx.config, ctx.config.model.hf
    if hf.architecture is None or is_causal(config.model) or config.task.target is not None:
        return
    if not config.data.is_arrays:
        known = next((task for end, task in TASKS.items() if hf.architecture.endswith(end)), None)
        yield make_error(
            config,
            "task.target model.hf.architecture",
            "without a task a model of transformers predicts the next token",
            "write task.target="
            + (f"toolkit.tasks.{known}" if known else "my.package.Task, or another architecture"),
        )


def image_data_needs_an_image_model(ctx: RuleContext) -> Iterator[Problem]:
    config = ctx.config
    if not config.data.is_arrays:
        return
    if ctx.of_a_family and ctx.megatron:
        yield make_error(
            config,
            "data.name engine.name",
            "Megatron-core builds the families' models, and these read tokens",
            "write engine=deepspeed",
        )
    elif ctx.of_a_family or is_causal(config.model):
        yield make_error(
            config,
            f"data.name {config.model.source_key} model.pretrained",
            "language models read tokens; images need a module of your own, or an image model",
            "write model=custom model.target=toolkit.models.vision.vit, or model=huggingface "
            "model.hf.architecture=AutoModelForImageClassification, or data=stdlib",
        )
    if config.monitor.prompt is not None:
        yield make_error(
            config,
            "monitor.prompt data.name",
            "an image model cannot continue a text",
            "write monitor.prompt=null",
        )
    if config.train.sequence_length != TrainConfig().sequence_length:
        yield make_warning(
            config,
            "train.sequence_length data.name",
            "the records decide the shape of an image",
            "leave out train.sequence_length",
        )


def sequence_fits_the_model(ctx: RuleContext) -> Iterator[Problem]:
    limit, length = ctx.max_position_embeddings, ctx.config.train.sequence_length
    if limit is not None and length > limit and not ctx.config.data.is_arrays:
        key = ctx.size_key("max_position_embeddings")
        yield Problem(
            "train.sequence_length",
            f"train.sequence_length={length}, {key.lstrip('+')}={limit}",
            "a sequence must have at most max_position_embeddings tokens",
            f"write train.sequence_length={limit}" + (f", or {key}={length}" if ctx.sizes_are_free else ""),
        )


def vocabulary_fits_the_model(ctx: RuleContext) -> Iterator[Problem]:
    data, rows = ctx.config.data, ctx.vocab_size
    if rows is not None and data.name == "stdlib" and data.vocab_size > rows:
        key = ctx.size_key("vocab_size")
        yield Problem(
            "model.vocab_size",
            f"{key.lstrip('+')}={rows}, data.vocab_size={data.vocab_size}",
            "every token of the tokenizer must have a row of the embedding",
            (f"write {key}={data.vocab_size}, or " if ctx.sizes_are_free else "write ")
            + f"data.vocab_size={rows}",
        )


def dense_families_have_no_experts(ctx: RuleContext) -> Iterator[Problem]:
    model = ctx.config.model
    if ctx.traits is not None and not ctx.traits.experts:
        for key in ("num_local_experts", "num_experts_per_tok"):
            if getattr(model, key):
                yield make_error(
                    ctx.config,
                    f"model.{key} model.family",
                    f"{model.family} has no experts",
                    ("write model=mixtral, or " if ctx.sizes_are_free else "") + f"leave model.{key} out",
                )
        if model.router_aux_loss_coef:
            yield make_error(
                ctx.config,
                "model.router_aux_loss_coef model.family",
                f"{model.family} has no router",
                "leave model.router_aux_loss_coef out",
            )


def routers_get_gradients(ctx: RuleContext) -> Iterator[Problem]:
    """With one expert per token the routers' gradients are rounding noise, which AdamW makes full steps of.

    After 20 steps no two layouts have losses within 1e-3 of each other. Megatron-core does not start.
    """
    if ctx.shape is None or ctx.shape.num_experts_per_tok != 1:
        return
    model = ctx.config.model
    if model.pretrained is not None:
        remedy = "choose a pretrained model with two or more experts per token"
    elif ctx.shape.num_local_experts == 1:
        experts = "model.num_local_experts=8 model.num_experts_per_tok=2"
        remedy = f"write {experts}, or for a model without experts model=llama"
    else:
        remedy = "write model.num_experts_per_tok=2"
    yield Problem(
        "model.num_experts_per_tok",
        "model.num_experts_per_tok=1",
        f"{model.family} divides the router's weights by their sum over the experts that a token visits: "
        "with one expert the weight is always 1, and the router gets no gradient",
        remedy,
    )


def router_loss_depends_on_the_layout(ctx: RuleContext) -> Iterator[Problem]:
    if ctx.traits is not None and ctx.traits.experts and ctx.config.model.router_aux_loss_coef:
        yield make_warning(
            ctx.config,
            "model.router_aux_loss_coef",
            "the router's balancing loss is computed per micro-batch, so losses depend on train.micro_batch",
            "keep train.micro_batch, or write model.router_aux_loss_coef=0, to compare layouts",
        )


RULES: tuple[Rule, ...] = (
    a_model_has_one_source,
    models_without_a_family,
    other_models_have_a_task,
    image_data_needs_an_image_model,
    sequence_fits_the_model,
    vocabulary_fits_the_model,
    dense_families_have_no_experts,
    routers_get_gradients,
    router_loss_depends_on_the_layout,
)
