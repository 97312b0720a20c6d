"""Training: the loop, a run from plan to exit code, and saving, evaluation and resuming.

The package is also the function ``train`` of the Python interface: ``toolkit.api.train``.
"""

from toolkit.callable_package import make_callable

make_callable(__name__)
