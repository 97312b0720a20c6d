"""The commands as modules: ``python -m toolkit.launch.train``, ``torchrun -m``, ``deepspeed --module``.

Their files are in launch/, at the top of the repository. A wheel has them in this folder instead of this file
(``package-dir`` in pyproject.toml).
"""

from pathlib import Path

__path__ = [str(Path(__file__).resolve().parents[2] / "launch")]
