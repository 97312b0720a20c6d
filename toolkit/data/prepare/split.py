"""Which documents go to validation: the share that is asked for, and at least one document of two."""

from __future__ import annotations

from toolkit.data.prepare.keys import below, side
from toolkit.data.prepare.plan import Plan
from toolkit.data.prepare.read import decoded, documents
from toolkit.progress import Progress


def validation_below(plan: Plan, progress: Progress) -> int:
    """Return the value of ``PreparationPlan.validation_below`` that gives validation at least one document of two.

    Reads documents until one is for validation; of a small input that may be all of them. If the configured share
    selects none, the document with the smallest hash is used, provided that another one is left for training.
    """
    threshold = below(plan.recipe["validation"])
    if not threshold:
        return 0
    smallest: list[int] = []  # hashes of two different documents
    with progress.task("searching a validation document", unit="documents") as task:
        for unit in plan.units:
            for document in documents(plan, unit):
                task.advance()
                if not document.content:
                    continue
                value = side(decoded(document.content)[0])
                if value < threshold:
                    return threshold
                smallest = sorted({*smallest, value})[:2]
    return smallest[0] + 1 if len(smallest) == 2 else threshold
