"""Which documents go to validation: the share that is asked for, and at least one document of two."""

from __future__ import annotations

from toolkit.data.prepare.keys import below, side
from toolkit.data.prepare.plan import Plan
from toolkit.data.prepare.read import decoded, documents
from toolkit.progress import Progress


def validation_below(plan: Plan, progress: Progress) -> int:
    """See ``Plan.validation_below``. Reads documents until one goes to validation; of a small input that may be all of them.

    If the share gives none, the document of the least ``side`` goes to validation, provided that another one is left for training.
    """
    wanted = below(plan.recipe["validation"])
    if not wanted:
        return 0
    least: list[int] = []  # of two different documents
    with progress.task("looking for a validation document", unit="documents") as task:
        for unit in plan.units:
            for document in documents(plan, unit):
                task.advance()
                if not document.content:
                    continue
                found = side(decoded(document.content)[0])
                if found < wanted:
                    return wanted
                least = sorted({*least, found})[:2]
    return least[0] + 1 if len(least) == 2 else wanted
