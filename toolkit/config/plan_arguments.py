"""The arguments that ``launch/plan.py`` takes besides those of a run. The string below a field is its help
text.
"""

from __future__ import annotations

from dataclasses import dataclass

from toolkit.config.checks import check
from toolkit.config.numbers import is_deadline

LISTS = ("scaling", "measured")  # arguments with values separated by commas


@dataclass(kw_only=True, slots=True)
class PlanArguments:
    """Arguments that select what is shown besides the plan."""

    advise: bool = False
    """Search engine, layout, ZeRO stage, micro-batch, recomputation and offload for the fastest run on the
    GPUs of cluster.*, and show the best layouts. Keys on the command line stay as they are; those of an
    experiment may be changed.
    """
    deadline: str | None = None
    """With advise=true: the run must end within this time (36h, 2d) or by this date (2027-01-31,
    2027-01-31T18:00), and by budget.until. The advice is then the cheapest layout that does, on cluster.nodes
    or fewer.
    """
    scaling: str | None = None
    """Show strong and weak scaling over numbers of ranks: a range that is doubled (1..1024), or a list
    (8,64,256). cluster.* describes the nodes, and the machines that train.global_batch is meant for.
    """
    measured: str | None = None
    """With scaling: run directories, separated by commas, of the same model on the same kind of hardware.
    Their measured step times are shown, and correct the predicted ones.
    """
    out: str | None = None
    """With advise=true: write the best layout as an experiment, for +exp=NAME. A name of letters, digits and
    - or _ is written to the folder exp of your configuration folder; FILE.yaml to that file. With scaling:
    the folder of the page and the plot; null: scaling/<run.name>.
    """

    def __post_init__(self) -> None:
        check(
            self.deadline is None or is_deadline(self.deadline),
            "deadline",
            self.deadline,
            "a deadline is a time from now in minutes, hours or days, or a date",
            "write deadline=36h, deadline=2d or deadline=2027-01-31",
        )
        check(
            self.deadline is None or self.advise,
            "deadline",
            self.deadline,
            "a deadline limits the search of advise=true",
            "write advise=true, or leave it out",
        )
        check(
            self.measured is None or self.scaling is not None,
            "measured",
            self.measured,
            "measured runs are compared with scaling curves",
            "write scaling=1..1024, or leave it out",
        )
        check(
            self.scaling is None or not self.advise,
            "scaling",
            f"{self.scaling} advise=true",
            "scaling curves are those of the layout as written, with small changes where it breaks",
            "leave out one of the two",
        )
        check(
            self.out is None or self.advise or self.scaling is not None,
            "out",
            self.out,
            "out is the file of an advice or the folder of a scaling report",
            "write advise=true or scaling=1..1024, or leave it out",
        )
