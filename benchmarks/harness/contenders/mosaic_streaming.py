"""mosaicml-streaming: MDS shards, its own loader, py1e shuffle."""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from harness.contenders.common import LENGTH, SEED, Contender, CountedBatches, OpenedStream, StreamRank
from harness.corpus import Corpus

if TYPE_CHECKING:
    import torch


_STANDINS = {
    "torchvision": (),
    "torchvision.datasets": ("VisionDataset",),
    "torchvision.transforms": (),
    "torchvision.transforms.functional": ("to_tensor",),
}


def _streaming() -> Any:
    """Import the package, which imports torchvision for image data sets only.

    If torchvision is absent (there is no build on PyPI for CPU builds of torch), empty modules replace it.
    """
    if "streaming" not in sys.modules and importlib.util.find_spec("torchvision") is None:
        import transformers.feature_extraction_utils
        import transformers.tokenization_utils_base  # noqa: F401 - they look for torchvision: before there is a stand-in

        for name, members in _STANDINS.items():
            sys.modules[name] = ModuleType(name)
            for member in members:
                setattr(sys.modules[name], member, type(member, (), {}))
        importlib.import_module("streaming")
        for name in _STANDINS:
            del sys.modules[name]
    return importlib.import_module("streaming")


def make(corpus: Corpus, folder: Path) -> None:
    streaming = _streaming()
    with streaming.MDSWriter(out=str(folder), columns={"tokens": f"ndarray:uint16:{LENGTH}"}) as writer:
        for window in corpus.windows(LENGTH):
            writer.write({"tokens": window})


def open_mds(corpus: Corpus, folder: Path, stream_rank: StreamRank, state: bytes | None) -> OpenedStream:
    streaming = _streaming()
    if stream_rank.rank == 0 and stream_rank.ranks == 1:
        streaming.base.util.clean_stale_shared_memory()  # as its documentation asks for after a crash
    dataset = streaming.StreamingDataset(
        local=str(folder), shuffle=True, shuffle_seed=SEED, batch_size=stream_rank.batch
    )
    loader = streaming.StreamingDataLoader(
        dataset, batch_size=stream_rank.batch, num_workers=0, drop_last=True
    )
    if state:
        loader.load_state_dict(json.loads(state))

    def endless() -> Iterator[torch.Tensor]:
        while True:
            for batch in loader:
                yield batch["tokens"].long()

    return OpenedStream(CountedBatches(endless()), lambda: json.dumps(loader.state_dict()).encode())


CONTENDERS = {
    "mosaicml-streaming": Contender(
        "mosaicml-streaming MDS",
        "ndarray:uint16:2048, no compression, StreamingDataLoader, shuffle=True (py1e) and other defaults",
        ("mosaicml-streaming",),
        ("torch",),
        open_mds,
        make,
        prepare=_streaming,
    )
}
