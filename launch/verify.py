"""Compare every layout of both engines with the local engine, and write the results:

    python launch/verify.py                              the core, on GPUs (at most ten minutes) or CPU ranks
    python launch/verify.py --cells all                  the whole matrix
    python launch/verify.py --cells 'megatron/*' deepspeed/llama/dp2-zero3
    python launch/verify.py --list

Writes docs/parity.md and benchmarks/results/parity.json in a checkout, else parity.md and parity.json here;
rows of cells that do not run are kept. Cells that need more GPUs than there are are reported as not run.
Exit code: 0 every cell that ran agrees, 1 a cell does not agree, 2 a usage error.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from toolkit.cluster.world.machine_info import detect_machine
from toolkit.commands import command_line, in_this_form
from toolkit.errors import ExitCode, UserError
from toolkit.logs import configure_logging
from toolkit.plan.types import Device
from toolkit.progress import Progress

ROOT = Path(__file__).resolve().parents[1]
MARKDOWN, ROWS = ROOT / "docs" / "parity.md", ROOT / "benchmarks" / "results" / "parity.json"
IN_CHECKOUT = MARKDOWN.is_file()
CPU_RANKS = 4


def main(arguments: Sequence[str]) -> int:
    configure_logging()
    parser = argparse.ArgumentParser(
        prog=command_line("verify"),
        description=in_this_form(__doc__ or ""),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--cells", nargs="+", default=["core"], help="core, all, names, or patterns of names with *"
    )
    parser.add_argument("--cpu", action="store_true", help="use CPU ranks even if there are GPUs")
    parser.add_argument("--json", type=Path, default=ROWS if IN_CHECKOUT else Path(ROWS.name))
    parser.add_argument("--markdown", type=Path, default=MARKDOWN if IN_CHECKOUT else Path(MARKDOWN.name))
    parser.add_argument("--list", action="store_true", help="list the names of the cells and exit")
    given = parser.parse_args(arguments)
    from toolkit.testing.matrix import select_cells

    try:
        cells = select_cells(["all"] if given.list else given.cells)
    except UserError as error:
        print(error, file=sys.stderr)
        return ExitCode.USER
    if given.list:
        print("\n".join(cell.name for cell in cells))
        return ExitCode.DONE
    machine = detect_machine()
    gpus = 0 if given.cpu or not machine.torch_has_cuda else len(machine.gpus)
    device = Device.CUDA if gpus else Device.CPU

    from toolkit.testing import parity_report as report
    from toolkit.testing.dist import rank_pool
    from toolkit.testing.verify import ParityRow, failed_rows, verify

    before, measured = report.read_rows(given.json), list[ParityRow]()

    def record_row(row: ParityRow) -> None:
        """Print a row and save it, so that a verification that is stopped keeps what it measured."""
        measured.append(row)
        report.write_json(report.merge_rows(before, measured), given.json)
        loss = "" if row.differences is None else f"  loss {row.differences.loss:.1e}"
        cause = f"  {row.cause}" if row.cause else ""
        print(f"{row.cell} {row.case}: {row.verdict}{loss}  ({row.seconds:.1f} s){cause}", flush=True)

    devices = gpus or CPU_RANKS
    with (
        rank_pool(max(1, min(devices, max(cell.ranks for cell in cells))), device) as pool,
        Progress() as progress,
    ):
        rows = verify(cells, pool, devices=devices, device=device, progress=progress, report=record_row)
    merged = report.merge_rows(before, rows)
    report.write_json(merged, given.json)
    report.write_markdown(merged, given.markdown)
    wrong = failed_rows(rows)
    print(
        f"{len(rows) - len(wrong)} of {len(rows)} runs on {device.value} agree or did not run; "
        f"see {given.markdown}"
    )
    return ExitCode.FAILURE if wrong else ExitCode.DONE


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
