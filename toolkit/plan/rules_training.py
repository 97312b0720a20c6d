"""Rules about what is trained and for how long: model, data, optimizer, schedule, evaluation, checkpoints."""

from __future__ import annotations

from collections.abc import Iterator

from toolkit.config.data import DocumentMasking
from toolkit.config.mixture import EXAMPLE
from toolkit.config.schema import LrScaling, OptimizerName, ScheduleName, TrainConfig, parse_cadence
from toolkit.errors import Problem
from toolkit.plan.rule_context import Rule, RuleContext, refuse, seen, warn
from toolkit.plan.schedule import peak_rate

# Settings of Transformer Engine's attention. Document masks replace it by torch's attention, which ignores
# them.
TRANSFORMER_ENGINE_ATTENTION = (
    "cp_comm_type",
    "hierarchical_context_parallel_sizes",
    "fp8_dot_product_attention",
    "fp8_multi_head_attention",
)


def sequence_fits_the_model(ctx: RuleContext) -> Iterator[Problem]:
    shape, length = ctx.shape, ctx.config.train.sequence_length
    if shape is not None and length > shape.max_position_embeddings:
        yield refuse(
            ctx.config,
            "train.sequence_length model.max_position_embeddings",
            "a sequence has at most model.max_position_embeddings tokens",
            f"write train.sequence_length={shape.max_position_embeddings}"
            + (f", or model.max_position_embeddings={length}" if ctx.sizes_are_free else ""),
        )


def vocabulary_fits_the_model(ctx: RuleContext) -> Iterator[Problem]:
    data, shape = ctx.config.data, ctx.shape
    if shape is not None and data.name == "stdlib" and data.vocab_size > shape.vocab_size:
        yield refuse(
            ctx.config,
            "model.vocab_size data.vocab_size",
            "every token of the tokenizer has a row of the embedding",
            (f"write model.vocab_size={data.vocab_size}, or " if ctx.sizes_are_free else "write ")
            + f"data.vocab_size={shape.vocab_size}",
        )


def mixture_has_sources(ctx: RuleContext) -> Iterator[Problem]:
    data, steps = ctx.config.data, ctx.config.train.steps
    if data.name != "mixture" and (data.sources or data.phases):
        yield Problem(
            "data.sources",
            f"data.name={data.name} with data.sources or data.phases",
            "sources and phases belong to a mixture",
            "write data=mixture, or leave them out",
        )
    elif data.name == "mixture" and not data.sources:
        yield Problem(
            "data.sources",
            "data.name=mixture without data.sources",
            "a mixture has sources",
            f"write '{EXAMPLE}' and the others in the same way",
        )
    past = [phase["from_step"] for phase in data.phases if phase["from_step"] >= steps]
    if past:
        yield Problem(
            "data.phases",
            f"data.phases from step {past[0]} on, train.steps={steps}",
            "every phase begins before the run ends",
            f"write train.steps={past[0] + 1} or more, or leave out that phase",
        )


def dense_families_have_no_experts(ctx: RuleContext) -> Iterator[Problem]:
    model = ctx.config.model
    if ctx.traits is not None and not ctx.traits.experts:
        for key in ("num_local_experts", "num_experts_per_tok"):
            if getattr(model, key):
                yield refuse(
                    ctx.config,
                    f"model.{key} model.family",
                    f"{model.family} has no experts",
                    ("write model.family=mixtral, or " if ctx.sizes_are_free else "")
                    + f"leave model.{key} out",
                )
        if model.router_aux_loss_coef:
            yield refuse(
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
        remedy = f"write {experts}, or model.family=llama for a model without experts"
    else:
        remedy = "write model.num_experts_per_tok=2"
    yield Problem(
        "model.num_experts_per_tok",
        "model.num_experts_per_tok=1",
        "mixtral divides the router's weights by their sum over the experts that a token visits: with one "
        "expert the weight "
        "is always 1, and the router gets no gradient",
        remedy,
    )


def router_loss_depends_on_the_layout(ctx: RuleContext) -> Iterator[Problem]:
    if ctx.traits is not None and ctx.traits.experts and ctx.config.model.router_aux_loss_coef:
        yield warn(
            ctx.config,
            "model.router_aux_loss_coef",
            "the router's balancing loss is computed per micro-batch, so losses depend on train.micro_batch",
            "keep train.micro_batch, or write model.router_aux_loss_coef=0, to compare layouts",
        )


def target_models(ctx: RuleContext) -> Iterator[Problem]:
    config, model = ctx.config, ctx.config.model
    if model.target is None:
        if model.arguments:
            yield Problem(
                "model.arguments",
                f"model.arguments has {', '.join(model.arguments)}",
                "arguments belong to model.target",
                "write model.target=my.package.Model, or leave model.arguments out",
            )
        return
    if "." not in model.target:
        yield refuse(
            config,
            "model.target",
            "a model is given by its dotted path: module and class",
            "write model.target=my.package.Model",
        )
    given = [key for key in ("family", "pretrained") if getattr(model, key) is not None]
    if given:
        yield refuse(
            config,
            " ".join(["model.target", *(f"model.{key}" for key in given)]),
            "a model has one source",
            "write model=custom model.target=my.package.Model, or leave model.target out",
        )
    if config.train.activation_checkpointing:
        yield refuse(
            config,
            "train.activation_checkpointing model.target",
            "a model of your own decides itself what to recompute",
            "leave out train.activation_checkpointing, and call torch.utils.checkpoint in the model",
        )
    if config.monitor.prompt is not None:
        yield warn(
            config,
            "monitor.prompt model.target",
            "only the families' models can continue a text",
            "write monitor.prompt=null",
        )


def image_data_needs_an_image_model(ctx: RuleContext) -> Iterator[Problem]:
    config = ctx.config
    if not config.data.images:
        return
    if config.model.target is None and ctx.megatron:
        yield refuse(
            config,
            "data.name engine.name",
            "Megatron-core builds the families' models, and these read tokens",
            "write engine=deepspeed",
        )
    elif config.model.target is None:
        yield refuse(
            config,
            "data.name model.family model.pretrained",
            "the families read tokens; images need a module of your own",
            "write model=custom model.target=toolkit.models.vision.vit, or data=stdlib",
        )
    if config.monitor.prompt is not None:
        yield refuse(
            config,
            "monitor.prompt data.name",
            "an image model cannot continue a text",
            "write monitor.prompt=null",
        )
    if config.train.sequence_length != TrainConfig().sequence_length:
        yield warn(
            config,
            "train.sequence_length data.name",
            "the records decide the shape of an image",
            "leave out train.sequence_length",
        )


def momentum_is_used(ctx: RuleContext) -> Iterator[Problem]:
    optim = ctx.config.optim
    if optim.name is OptimizerName.adamw and optim.momentum:
        yield refuse(
            ctx.config,
            "optim.momentum optim.name",
            "adamw uses optim.betas and has no momentum",
            f"write optim.betas=[{optim.momentum},{optim.betas[1]}], or leave optim.momentum out",
        )


def learning_rate_scaling(ctx: RuleContext) -> Iterator[Problem]:
    optim = ctx.config.optim
    if optim.lr_scaling is not LrScaling.none and optim.lr_reference_batch is None:
        yield refuse(
            ctx.config,
            "optim.lr_reference_batch optim.lr_scaling",
            "scaling needs the global batch for which optim.lr was chosen",
            f"write optim.lr_reference_batch={ctx.config.train.global_batch}, or optim.lr_scaling=none",
        )
    elif optim.lr_reference_batch is not None and optim.lr_reference_batch < 1:
        yield refuse(
            ctx.config,
            "optim.lr_reference_batch",
            "a batch has at least one sequence",
            "write optim.lr_reference_batch=256",
        )
    elif optim.lr_scaling is LrScaling.none and optim.lr_reference_batch is not None:
        yield warn(
            ctx.config,
            "optim.lr_reference_batch optim.lr_scaling",
            "the reference batch is used with lr_scaling only",
            "write optim.lr_scaling=linear or sqrt, or leave it out",
        )


def schedule_fits_the_run(ctx: RuleContext) -> Iterator[Problem]:
    config, schedule, steps = ctx.config, ctx.config.schedule, ctx.config.train.steps
    if schedule.name is ScheduleName.wsd and schedule.decay is None:
        yield refuse(
            config,
            "schedule.decay schedule.name",
            "wsd is constant until its last schedule.decay steps, so it needs their number",
            f"write schedule.decay={max(1, steps // 10)}, a tenth of the run",
        )
        return
    if schedule.name is ScheduleName.constant and schedule.decay is not None:
        yield warn(
            config,
            "schedule.decay schedule.name",
            "a constant schedule does not decay",
            "write schedule.name=linear, or leave out schedule.decay",
        )
    ends = schedule.warmup + (schedule.decay or 0)
    if schedule.name is ScheduleName.wsd and ends > steps:
        yield refuse(
            config,
            "schedule.decay schedule.warmup train.steps",
            "warm-up and decay of wsd do not overlap: warmup + decay <= steps",
            f"write schedule.decay={max(1, steps - schedule.warmup)}, or train.steps={ends}",
        )
    elif schedule.warmup and schedule.warmup >= steps:  # a decay may be longer: the run can be extended later
        yield warn(
            config,
            "train.steps schedule.warmup",
            "the run ends during warm-up and never reaches the peak learning rate",
            f"write train.steps={schedule.warmup + 1} or more, or a shorter schedule.warmup",
        )


def rates_are_ordered(ctx: RuleContext) -> Iterator[Problem]:
    top, low = peak_rate(ctx.config.optim, ctx.config.train.global_batch), ctx.config.schedule.min_lr
    if low > top:
        yield refuse(
            ctx.config,
            "schedule.min_lr optim.lr",
            f"the learning rate decays from the peak ({top:g}) to schedule.min_lr",
            f"write schedule.min_lr={top / 10:g}",
        )


def evaluation_has_sets(ctx: RuleContext) -> Iterator[Problem]:
    evaluation = ctx.config.eval
    if evaluation.every and not evaluation.sets:
        yield refuse(
            ctx.config,
            "eval.sets eval.every",
            "an evaluation needs at least one set",
            "write eval.sets=[validation], or eval.every=0",
        )
    if len(set(evaluation.sets)) != len(evaluation.sets):
        yield refuse(ctx.config, "eval.sets", "each set is evaluated once", "write each name once")


def checkpoints_are_written(ctx: RuleContext) -> Iterator[Problem]:
    checkpoint = ctx.config.checkpoint
    cadence = parse_cadence(checkpoint.every)
    never = cadence.steps is None and cadence.seconds is None
    if never and not checkpoint.at_end:
        yield warn(
            ctx.config,
            "checkpoint.every checkpoint.at_end",
            "nothing of this run is saved, unless it is stopped by a signal",
            "write checkpoint.at_end=true",
        )
    if cadence.steps is not None and checkpoint.keep_every % cadence.steps:
        yield warn(
            ctx.config,
            "checkpoint.keep_every checkpoint.every",
            "only written checkpoints can be kept, so keep_every is a multiple of every",
            f"write checkpoint.keep_every={-(-checkpoint.keep_every // cadence.steps) * cadence.steps}",
        )


def fork_excludes_resume(ctx: RuleContext) -> Iterator[Problem]:
    config = ctx.config
    if config.run.fork is not None and config.resume not in ("auto", "never"):
        yield refuse(
            config,
            "run.fork resume",
            "a run starts either from another run's state or from a checkpoint of its own",
            "leave out run.fork to resume, or resume to fork",
        )


def only_text_has_documents(ctx: RuleContext) -> Iterator[Problem]:
    if ctx.config.data.documents is DocumentMasking.separate and ctx.config.data.images:
        yield refuse(
            ctx.config, "data.documents data.name", "only text has documents", "leave out data.documents"
        )


def megatron_attention_takes_a_mask(ctx: RuleContext) -> Iterator[Problem]:
    """Without this rule these keys would be ignored silently.

    Captured CUDA graphs were seen to reuse an old mask.
    """
    config = ctx.config
    if not ctx.megatron or config.data.documents is DocumentMasking.joined:
        return
    for name in (*TRANSFORMER_ENGINE_ATTENTION, "cuda_graph_impl"):
        value, key = config.engine.megatron.get(name), f"engine.megatron.{name}"
        if value is not None and value is not False and value != "none":
            yield Problem(
                key,
                f"{key}={value}, {seen(config, 'data.documents')}",
                "separate documents use a mask in torch's attention, which replaces Transformer Engine's and "
                "CUDA graphs",
                f"leave out {key}, or write data.documents=joined",
            )


RULES: tuple[Rule, ...] = (
    target_models,
    image_data_needs_an_image_model,
    sequence_fits_the_model,
    vocabulary_fits_the_model,
    dense_families_have_no_experts,
    routers_get_gradients,
    router_loss_depends_on_the_layout,
    momentum_is_used,
    learning_rate_scaling,
    schedule_fits_the_run,
    rates_are_ordered,
    evaluation_has_sets,
    checkpoints_are_written,
    fork_excludes_resume,
    mixture_has_sources,
    only_text_has_documents,
    megatron_attention_takes_a_mask,
)
