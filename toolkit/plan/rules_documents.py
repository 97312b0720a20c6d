"""Rules of documents that are kept apart in their windows."""

from __future__ import annotations

from collections.abc import Iterator

from toolkit.config.data import Documents
from toolkit.errors import Problem
from toolkit.plan.rule_context import Rule, RuleContext, refuse, seen

ROOT = "engine.megatron"
# What Megatron-core leaves to Transformer Engine's attention, in whose place torch's stands where it is given a mask.
OF_ITS_ATTENTION = (
    "cp_comm_type",
    "hierarchical_context_parallel_sizes",
    "fp8_dot_product_attention",
    "fp8_multi_head_attention",
)


def samples_have_documents(ctx: RuleContext) -> Iterator[Problem]:
    if ctx.config.data.documents is Documents.separate and ctx.config.data.images:
        yield refuse(
            ctx.config, "data.documents data.name", "documents are of text", "leave data.documents out"
        )


def attention_takes_a_mask(ctx: RuleContext) -> Iterator[Problem]:
    """Without it these would be ignored in silence; a captured graph has been seen with no mask that changes."""
    config = ctx.config
    if not ctx.megatron or config.data.documents is Documents.joined:
        return
    for name in (*OF_ITS_ATTENTION, "cuda_graph_impl"):
        value = config.engine.megatron.get(name)
        if value is not None and value is not False and value != "none":
            yield Problem(
                f"{ROOT}.{name}",
                f"{ROOT}.{name}={value}, {seen(config, 'data.documents')}",
                "documents are kept apart by a mask of torch's attention, in place of Transformer Engine's and outside of graphs",
                f"leave {ROOT}.{name} out, or write data.documents=joined",
            )


RULES: tuple[Rule, ...] = (samples_have_documents, attention_takes_a_mask)
