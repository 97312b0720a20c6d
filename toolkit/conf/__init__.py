"""The groups and experiments that Hydra composes, found by ``toolkit.config.search_path``.

Their files are in conf/, at the top of the repository. A wheel has them in this folder instead of this file
(``package-dir`` in pyproject.toml).
"""

from pathlib import Path

__path__ = [str(Path(__file__).resolve().parents[2] / "conf")]
