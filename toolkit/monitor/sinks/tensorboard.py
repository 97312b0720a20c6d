"""TensorBoard: ``'+monitor.sinks.tensorboard={}'``, then ``tensorboard --logdir RUN_DIR/tensorboard``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from toolkit.monitor.sink import Kind, Row, Sink, SinkRun
from toolkit.monitor.sinks.columns import metric_columns


class TensorBoardSink(Sink):
    """Writes event files. After a resume TensorBoard ignores the rows of repeated steps of earlier starts.

    Args:
        folder: of the event files. Null: ``tensorboard`` in the run's directory.
    """

    def __init__(self, folder: str | None = None) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer_class, self._folder = SummaryWriter, folder
        self._writer: Any = None
        self._step = 0

    def open(self, run: SinkRun) -> None:
        folder = Path(self._folder) if self._folder is not None else run.folder / "tensorboard"
        self._writer = self._writer_class(str(folder), purge_step=run.first_step + 1)
        self._step = run.first_step

    def log(self, kind: Kind, row: Row) -> None:
        self._step = row["step"]
        for name, value in metric_columns(kind, row).items():
            self._writer.add_scalar(name, value, row["step"])

    def log_summary(self, name: str, value: str | float) -> None:
        if isinstance(value, str):
            self._writer.add_text(name, value, self._step)
        else:
            self._writer.add_scalar(name, value, self._step)

    def log_image(self, name: str, path: Path) -> None:
        import numpy as np
        from PIL import Image

        with Image.open(path) as image:
            self._writer.add_image(name, np.asarray(image.convert("RGB")), self._step, dataformats="HWC")

    def flush(self) -> None:
        self._writer.flush()

    def close(self, exit_code: int) -> None:
        self._writer.close()
