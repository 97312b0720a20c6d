"""Compare predicted step time and peak memory with published measurements.

    python benchmarks/planner.py                     # the rows of benchmarks/data/published_steps.csv
    python benchmarks/planner.py rows.csv            # rows in the same columns
    python benchmarks/planner.py --fit               # fit the free parameters again, and print them

The errors are of predicted over measured time. ``leave one system out`` fits the free parameters to all other
systems and predicts the one that was left out. The fit keeps the parameters near what they should be from
other sources (``PRIORS``), so that a parameter that no row depends on stays there.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from published import ROWS, Published, read_published

from toolkit.estimate.profile import HardwareProfile, load_profile
from toolkit.estimate.step import estimate_step

# Free parameters, with the value expected from other sources and the standard deviation of its logarithm.
# "a100/NAME" is a field of the A100's profile, NAME alone of all profiles.
PRIORS: dict[str, tuple[float, float]] = {
    "a100/matmul_fraction": (0.80, 0.15),  # large products alone reach 0.87, without a training run's heat
    "h100/matmul_fraction": (0.72, 0.15),  # 0.80 alone
    "host_seconds": (5e-5, 0.5),  # about five operators of torch at 10 us
    "torch_layers": (1.1, 0.15),
    "inside_factor": (0.7, 0.3),
}
PRIOR_WEIGHT = 0.1  # of one standard deviation, in units of the logarithm of a row's error
ROBUST = 0.1  # error from which a row counts linearly instead of quadratically
ITERATIONS = 12


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("rows", type=Path, nargs="?", default=ROWS)
    parser.add_argument("--fit", action="store_true", help="fit the free parameters and use them")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "planner.json")
    given = parser.parse_args()
    rows = read_published(given.rows)
    values = fit(rows) if given.fit else {}
    for name, value in values.items():
        print(f"{name:24} {value:.4g}")
    result = {
        "rows": [_row(row, values) for row in rows],
        "systems": _systems(rows, values),
        "leave_one_system_out": leave_one_out(rows),
        "fitted": values,
    }
    show(result)
    given.out.write_text(json.dumps(result, indent=1) + "\n")


def profile_with(row: Published, values: Mapping[str, float]) -> HardwareProfile:
    """The shipped profile of the row's GPU with ``values`` of the free parameters."""
    profile = load_profile(row.plan.config.cluster, row.plan.world)
    assert profile is not None, f"{row.plan.world.gpu} has no profile"
    fields: dict[str, Any] = {}
    for name, value in values.items():
        chip, _, field = name.rpartition("/")
        if profile.name.startswith(chip):
            fields[field] = value
    return replace(profile, **fields)


def errors(rows: Sequence[Published], values: Mapping[str, float]) -> list[float]:
    """The logarithm of predicted over measured seconds of each row."""
    found = []
    for row in rows:
        estimate = estimate_step(row.plan, profile_with(row, values))
        assert estimate is not None, f"no estimate for {row.overrides}"
        found.append(math.log(estimate.seconds / row.seconds))
    return found


def fit(rows: Sequence[Published]) -> dict[str, float]:
    """Fit the free parameters by robust least squares: Levenberg and Marquardt's method in logarithms."""
    names = list(PRIORS)
    centre = np.log([PRIORS[name][0] for name in names])
    width = np.array([PRIORS[name][1] for name in names])

    def residuals(at: NDArray[np.float64]) -> NDArray[np.float64]:
        values = dict(zip(names, np.exp(at).tolist(), strict=True))
        return np.array([*errors(rows, values), *(PRIOR_WEIGHT * (at - centre) / width)])

    at, damping = centre.copy(), 1e-2
    found = residuals(at)
    for _ in range(ITERATIONS):
        slopes = np.stack(
            [(residuals(at + 0.02 * unit) - found) / 0.02 for unit in np.eye(len(names))], axis=1
        )
        weights = 1 / np.sqrt(1 + (found / ROBUST) ** 2)
        normal = slopes.T @ (weights[:, None] * slopes)
        step = -np.linalg.solve(normal + damping * np.diag(np.diag(normal)), slopes.T @ (weights * found))
        new = residuals(at + step)
        if _cost(new) < _cost(found):
            at, found, damping = at + step, new, damping / 3
        else:
            damping *= 10
    return dict(zip(names, np.exp(at).tolist(), strict=True))


def _cost(found: NDArray[np.float64]) -> float:
    return float(np.sum(np.sqrt(1 + (found / ROBUST) ** 2) - 1))


def leave_one_out(rows: Sequence[Published]) -> dict[str, float]:
    """Mean absolute error of each system, in percent, with parameters fitted to the others."""
    found = {}
    for system in dict.fromkeys(row.system for row in rows):
        values = fit([row for row in rows if row.system != system])
        found[system] = _mape(errors([row for row in rows if row.system == system], values))
    return found


def _mape(logarithms: Sequence[float]) -> float:
    return 100 * statistics.mean(abs(math.expm1(error)) for error in logarithms)


def _row(row: Published, values: Mapping[str, float]) -> dict[str, object]:
    estimate = estimate_step(row.plan, profile_with(row, values))
    assert estimate is not None
    memory = row.plan.memory
    return {
        "system": row.system,
        "words": " ".join(row.overrides),
        "measured_seconds": row.seconds,
        "seconds": estimate.seconds,
        "low": estimate.low,
        "high": estimate.high,
        "measured_bytes": row.memory,
        "bytes": None if memory is None else memory.device_total,
    }


def _systems(rows: Sequence[Published], values: Mapping[str, float]) -> dict[str, dict[str, float | None]]:
    """Errors in percent of each system and of all rows."""
    grouped: dict[str, list[Published]] = defaultdict(list)
    for row in rows:
        grouped[row.system].append(row)
        grouped["all"].append(row)
    found: dict[str, dict[str, float | None]] = {}
    for system, members in grouped.items():
        logarithms = errors(members, values)
        memory = [
            abs(row.plan.memory.device_total / row.memory - 1)
            for row in members
            if row.memory is not None and row.plan.memory is not None
        ]
        inside = [
            row["low"] <= row["measured_seconds"] <= row["high"]  # type: ignore[operator]
            for row in (_row(member, values) for member in members)
        ]
        found[system] = {
            "rows": len(members),
            "step_mape": _mape(logarithms),
            "step_bias": 100 * math.expm1(statistics.mean(logarithms)),
            "inside_interval": 100 * statistics.mean(inside),
            "memory_mape": 100 * statistics.mean(memory) if memory else None,
        }
    return found


def show(result: Mapping[str, object]) -> None:
    rows, systems, left_out = result["rows"], result["systems"], result["leave_one_system_out"]
    assert isinstance(rows, list)
    assert isinstance(systems, dict)
    assert isinstance(left_out, dict)
    for row in rows:
        ratio = row["seconds"] / row["measured_seconds"] - 1
        measured, predicted = row["measured_seconds"], row["seconds"]
        print(f"{row['system']:14} {measured:9.4g} s, predicted {predicted:9.4g} {ratio:+.1%}")
    print(f"{'system':14} {'rows':>4} {'MAPE':>7} {'bias':>7} {'left out':>9} {'in 80%':>7} {'memory':>7}")
    for system, values in systems.items():
        left = f"{left_out[system]:.1f}%" if system in left_out else ""
        memory = "" if values["memory_mape"] is None else f"{values['memory_mape']:.1f}%"
        print(
            f"{system:14} {values['rows']:4} {values['step_mape']:6.1f}% {values['step_bias']:+6.1f}% "
            f"{left:>9} {values['inside_interval']:6.0f}% {memory:>7}"
        )
    print(f"left out, mean over rows of all systems: {_mean_left_out(systems, left_out):.1f}%")


def _mean_left_out(systems: Mapping[str, Mapping[str, float]], left_out: Mapping[str, float]) -> float:
    total = sum(systems[system]["rows"] * error for system, error in left_out.items())
    return total / systems["all"]["rows"]


if __name__ == "__main__":
    main()
