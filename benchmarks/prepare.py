"""Compare preparing text with the tokenizer's ``encode_batch`` alone, in one process, on text in memory.

    python benchmarks/prepare.py                     Python's standard library, 5 rounds, about three minutes
    python benchmarks/prepare.py --copies 4          four times that text: start-up is a smaller part
    python benchmarks/prepare.py --input corpus      a folder of text files

Jobs alternate within each round, so that noise affects all of them; figures are medians, ratios are medians
of the ratios within rounds. The tokenizer (4,096 tokens) is trained before. CPU time counts every process;
MB/s are per core. Everything from reading the files to the manifest is included: hashing, sorting,
statistics and the picture.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from harness.environment import describe_machine, package_versions

from toolkit.data.tokens.stdlib import read_source_texts

os.environ["TOKENIZERS_PARALLELISM"] = "false"

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "prepare.json"
FLOOR = """
import os, sys, time
from pathlib import Path
from tokenizers import Tokenizer
tokenizer = Tokenizer.from_file(sys.argv[1])
tokenizer.encode_special_tokens = True
names = Path(sys.argv[2]).read_text().splitlines()
texts = [Path(name).read_bytes().decode(errors="replace") for name in names]
began = time.process_time(), time.perf_counter()
for first in range(0, len(texts), 8):
    getattr(tokenizer, sys.argv[3])(texts[first : first + 8], add_special_tokens=False)
print(time.process_time() - began[0], time.perf_counter() - began[1])
"""


def run_measured(command: list[str]) -> tuple[float, float, str]:
    """Return CPU and wall seconds of a command with all its processes, and its output."""
    before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    wall, after = time.perf_counter() - began, resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, wall, done.stdout


def written(folder: Path, copies: int) -> Path:
    texts = read_source_texts(Path(sysconfig.get_path("stdlib")))
    for name, content in ((f"{copy}/{name}", content) for copy in range(copies) for name, content in texts):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    return folder


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--input", type=Path)
    parser.add_argument("--copies", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        source = arguments.input or written(folder / "in", arguments.copies)
        prepare = [sys.executable, str(ROOT / "launch" / "prepare.py"), f"input={source}"]
        run_measured([*prepare, f"output={folder / 'first'}"])
        tokenizer = folder / "first" / "tokenizer" / "tokenizer.json"
        sources = json.loads((folder / "first" / "sources.json").read_text())
        (folder / "names").write_text("\n".join(str(source / one["name"]) for one in sources))
        megabytes = sum(one["bytes"] for one in sources) / 1e6
        given = [f"tokenizer.path={tokenizer}", "tokenizer.end_of_text='<|endoftext|>'"]

        def floor(call: str) -> tuple[float, float]:
            cpu, wall = run_measured(
                [sys.executable, "-c", FLOOR, str(tokenizer), str(folder / "names"), call]
            )[2].split()
            return float(cpu), float(wall)

        def whole(workers: int) -> tuple[float, float]:
            shutil.rmtree(folder / "out", ignore_errors=True)
            return run_measured([*prepare, f"output={folder / 'out'}", f"workers={workers}", *given])[:2]

        jobs: dict[str, Callable[[], tuple[float, float]]] = {
            "encode_batch": lambda: floor("encode_batch"),
            "encode_batch_fast": lambda: floor("encode_batch_fast"),
            "prepare, 1 worker": lambda: whole(1), "prepare, 2 workers": lambda: whole(2),
        }  # fmt: skip
        rounds = [{name: job() for name, job in jobs.items()} for _ in range(arguments.rounds)]
    result = {
        "megabytes": round(megabytes, 2),
        "rounds": arguments.rounds,
        "machine": describe_machine(),
        "versions": package_versions("tokenizers"),
        "jobs": {
            name: {
                "mb_per_cpu_second": round(statistics.median(megabytes / one[name][0] for one in rounds), 3),
                "mb_per_second": round(statistics.median(megabytes / one[name][1] for one in rounds), 3),
                "cpu_over_encode_batch": round(
                    statistics.median(one[name][0] / one["encode_batch"][0] for one in rounds), 3
                ),
            }
            for name in jobs
        },
    }
    kept = json.loads(RESULTS.read_text()) if RESULTS.is_file() else {}
    RESULTS.write_text(json.dumps({**kept, f"{megabytes:.0f} MB": result}, indent=1) + "\n")
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
