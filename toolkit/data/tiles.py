"""Synthetic tiles of a many-band satellite image with a class that can be learned, for +exp=vit_tiles.

    python -m toolkit.data.tiles data/tiles
    python -m toolkit.data.tiles data/large --train 100000 --validation 2000 --bands 4 --size 128

The class determines the spectrum of the ground and the direction and width of its stripes. Each tile has its
own brightness, phase and noise, and is mixed with the ground of another class, so that no single pixel
identifies the class. The same arguments give the same bytes.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from toolkit.data.records.reader import RecordManifest, describe_records
from toolkit.data.records.writer import RecordWriter
from toolkit.errors import ExitCode, UserError
from toolkit.progress import Progress

CLASSES = 10


def make_tiles(
    folder: str | Path,
    splits: dict[str, int],
    *,
    bands: int = 12,
    size: int = 64,
    classes: int = CLASSES,
    progress: Progress | None = None,
) -> RecordManifest:
    """Write ``splits`` (name -> records) of ``image`` uint16 [bands, size, size] and ``label`` int64.

    Raises InputError.
    """
    fields: dict[str, tuple[str, tuple[int, ...]]] = {
        "image": ("uint16", (bands, size, size)),
        "label": ("int64", ()),
    }
    progress = progress or Progress.silent()
    with RecordWriter(
        folder,
        fields,
        description="synthetic tiles of an image",
        licence="CC0-1.0",
        source="toolkit.data.tiles",
    ) as writer:
        for number, (split, records) in enumerate(splits.items()):
            with progress.task(f"making {split}", total=records, unit="tiles") as task:
                for record in range(records):
                    random = np.random.default_rng((number, record))
                    label = int(random.integers(classes))
                    writer.add(split, image=make_tile(label, random, bands, size, classes), label=label)
                    task.advance(1)
    return writer.manifest


def make_tile(
    label: int, random: np.random.Generator, bands: int, size: int, classes: int
) -> npt.NDArray[np.uint16]:
    """Return one tile, uint16 [bands, size, size], in ten-thousandths of reflectance as is usual."""
    other = (label + random.integers(1, classes)) % classes if classes > 1 else label
    mixed = random.uniform(0, 0.45)
    ground = (1 - mixed) * _spectrum(label, bands) + mixed * _spectrum(int(other), bands)
    rows, columns = np.mgrid[:size, :size] / size
    direction, waves = np.pi * label / classes, 3 + label % 3
    stripes = np.sin(
        2 * np.pi * (waves * (rows * np.cos(direction) + columns * np.sin(direction)) + random.uniform())
    )
    image = random.uniform(0.7, 1.3) * ground[:, None, None] * (1 + 0.3 * stripes)
    image += random.normal(0, 600, (bands, size, size))
    return image.clip(0, 10_000).astype(np.uint16)


def _spectrum(label: int, bands: int) -> npt.NDArray[np.float64]:
    """Return the reflectance of a class's ground, float64 [bands]."""
    return np.random.default_rng((label, bands)).uniform(1200, 2000, bands)


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder")
    for name, default in (
        ("train", 1024),
        ("validation", 256),
        ("bands", 12),
        ("size", 64),
        ("classes", CLASSES),
    ):
        parser.add_argument(f"--{name}", type=int, default=default)
    options = parser.parse_args(arguments)
    try:
        with Progress() as progress:
            manifest = make_tiles(
                options.folder,
                {"train": options.train, "validation": options.validation},
                bands=options.bands,
                size=options.size,
                classes=options.classes,
                progress=progress,
            )
    except UserError as error:
        print(error, file=sys.stderr)
        return ExitCode.USER
    print("\n".join([f"data       {manifest.folder}", *describe_records(manifest)]))
    return ExitCode.DONE


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
