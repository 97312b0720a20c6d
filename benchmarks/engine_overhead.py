"""Measure the overhead over a bare script with the same DeepSpeed settings, and over torch DDP.

    python benchmarks/engine_overhead.py         every ZeRO stage, and the time to the first step: ten minutes
    python benchmarks/engine_overhead.py --pairs 40 --block 4

These are the comparisons of engine_step.py for DeepSpeed's data parallelism, written to
benchmarks/results/engine_overhead.json.
"""

import sys

from engine_step import COMPARISONS, RESULTS, main

if __name__ == "__main__":
    names = [comparison.name for comparison in COMPARISONS if comparison.name.startswith("deepspeed-")]
    main(["--only", *names, "--out", str(RESULTS / "engine_overhead.json"), *sys.argv[1:]])
