"""launch/prepare.py with units and parts of a few kilobytes, so that little text is many tasks, and without a
picture.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from launch.prepare import main
from tests.data.sample_texts import write_histogram
from toolkit.data.prepare import plan, report, tokenise

plan.MIN_UNIT_BYTES = plan.MAX_UNIT_BYTES = 16 << 10
tokenise.PART_BYTES, tokenise.BATCH_TEXT_BYTES = 6 << 10, 2 << 10
report.draw_histogram = write_histogram

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
