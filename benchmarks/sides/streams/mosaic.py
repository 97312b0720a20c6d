"""mosaicml-streaming: MDS shards, its own loader, py1e shuffle."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from sides.corpus import Corpus
from sides.streams.common import LENGTH, SEED, Counted, Opened, Place, Side

if TYPE_CHECKING:
    import torch


def _streaming() -> Any:
    """Its package imports torchvision for picture data sets alone. Builds of that are tied to one build of torch, and those that fit
    a CPU build are not on PyPI: then an empty one stands in, which reading tokens never touches."""
    try:
        import torchvision.datasets  # noqa: F401
    except (ImportError, RuntimeError):  # RuntimeError: built for another torch
        for name in [name for name in sys.modules if name.partition(".")[0] == "torchvision"]:
            del sys.modules[name]
        for name, members in {"torchvision": (), "torchvision.datasets": ("VisionDataset",), "torchvision.transforms": ("Compose",),
                              "torchvision.transforms.functional": ("to_tensor",)}.items():
            module = ModuleType(name)
            for member in members:
                setattr(module, member, type(member, (), {}))
            sys.modules[name] = module
    import streaming

    return streaming


def make(corpus: Corpus, folder: Path) -> None:
    streaming = _streaming()
    with streaming.MDSWriter(out=str(folder), columns={"tokens": f"ndarray:uint16:{LENGTH}"}) as writer:
        for window in corpus.windows(LENGTH):
            writer.write({"tokens": window})


def open_mds(corpus: Corpus, folder: Path, place: Place, state: bytes | None) -> Opened:
    streaming = _streaming()
    if place.rank == 0 and place.ranks == 1:
        streaming.base.util.clean_stale_shared_memory()  # as its documentation asks for after a crash
    dataset = streaming.StreamingDataset(local=str(folder), shuffle=True, shuffle_seed=SEED, batch_size=place.batch)
    loader = streaming.StreamingDataLoader(dataset, batch_size=place.batch, num_workers=0, drop_last=True)
    if state:
        loader.load_state_dict(json.loads(state))

    def endless() -> Iterator[torch.Tensor]:
        while True:
            for batch in loader:
                yield batch["tokens"].long()

    return Opened(Counted(endless()), lambda: json.dumps(loader.state_dict()).encode())


SIDES = {
    "mosaicml-streaming": Side(
        "mosaicml-streaming MDS", "ndarray:uint16:2048, no compression, StreamingDataLoader, shuffle=True (py1e) and other defaults",
        ("mosaicml-streaming",), ("torch",), open_mds, make),
}
