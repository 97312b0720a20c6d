"""Every rule of a run, in the order in which problems are shown.

A rule is a pure function, and all rules always run.
"""

from __future__ import annotations

from toolkit.errors import Problem
from toolkit.plan import (
    rules_attention,
    rules_axes,
    rules_compile,
    rules_engine,
    rules_fp8,
    rules_layout,
    rules_machine,
    rules_megatron,
    rules_model,
    rules_optimizer,
    rules_recomputation,
    rules_training,
    rules_user_code,
    rules_zero_plus_plus,
)
from toolkit.plan.rule_context import Rule, RuleContext

RULES: tuple[Rule, ...] = (
    *rules_engine.RULES,
    *rules_zero_plus_plus.RULES,
    *rules_megatron.RULES,
    *rules_compile.RULES,
    *rules_fp8.RULES,
    *rules_optimizer.RULES,
    *rules_axes.RULES,
    *rules_layout.RULES,
    *rules_model.RULES,
    *rules_training.RULES,
    *rules_recomputation.RULES,
    *rules_attention.RULES,
    *rules_user_code.RULES,
    *rules_machine.RULES,
)


def find_problems(ctx: RuleContext) -> list[Problem]:
    """The problems that all rules find.

    Of several with the same key and value, or about the same engine key, the first.
    """
    found: dict[tuple[str, str], Problem] = {}
    for rule in RULES:
        for problem in rule(ctx):
            seen = "" if problem.key.startswith(("engine.deepspeed.", "engine.megatron.")) else problem.seen
            found.setdefault((problem.key, seen), problem)
    return list(found.values())
