"""Megatron-core's GPTDataset over the same .bin/.idx, behind a torch DataLoader with its sampler of consumed
samples."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from harness.contenders.common import (
    CACHE,
    GLOBAL_BATCH,
    LENGTH,
    SEED,
    Contender,
    CountedBatches,
    OpenedStream,
    StreamRank,
)
from harness.corpus import END_OF_TEXT, VOCABULARY, Corpus

if TYPE_CHECKING:
    import torch

EPOCHS = 4  # the index covers a whole run; this is enough for a measurement


def _dataset(corpus: Corpus, folder: Path) -> Any:
    from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
    from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig

    config = GPTDatasetConfig(
        random_seed=SEED,
        sequence_length=LENGTH,
        blend=([str(corpus.bin.with_suffix(""))], None),
        split="1,0,0",
        path_to_cache=str(folder / CACHE),
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
        create_attention_mask=False,
        tokenizer=SimpleNamespace(
            vocab_size=VOCABULARY, eod=END_OF_TEXT, pad=-1, unique_identifiers={"fabricated": True}
        ),  # type: ignore[arg-type]
    )
    samples = EPOCHS * (corpus.tokens // LENGTH)
    return BlendedMegatronDatasetBuilder(GPTDataset, [samples, 0, 0], lambda: True, config).build()[0]


class _Consumed:
    """Yield batches of indices after some consumed samples, like Megatron-LM's MegatronPretrainingSampler."""

    def __init__(self, total: int, consumed: int, stream_rank: StreamRank) -> None:
        self._total, self._consumed, self._place = total, consumed, stream_rank

    def __iter__(self) -> Iterator[list[int]]:
        for first in range(self._consumed, self._total - GLOBAL_BATCH + 1, GLOBAL_BATCH):
            mine = first + self._place.rank * self._place.batch
            yield list(range(mine, mine + self._place.batch))


def open_gpt(corpus: Corpus, folder: Path, stream_rank: StreamRank, state: bytes | None) -> OpenedStream:
    import torch

    dataset = _dataset(corpus, folder)
    taken = json.loads(state)["consumed_samples"] // GLOBAL_BATCH if state else 0

    def endless() -> Iterator[torch.Tensor]:
        consumed = taken * GLOBAL_BATCH
        while True:
            loader = torch.utils.data.DataLoader(
                dataset, batch_sampler=_Consumed(len(dataset), consumed, stream_rank), num_workers=0
            )
            for batch in loader:
                yield batch["tokens"]
            consumed = 0

    counted = CountedBatches(endless(), taken)
    return OpenedStream(
        counted, lambda: json.dumps({"consumed_samples": counted.taken * GLOBAL_BATCH}).encode()
    )


CONTENDERS = {
    "megatron": Contender(
        "Megatron GPTDataset",
        f"mmap, index of {EPOCHS} epochs cached on disk (built at the first start, found at a resume), "
        "no attention mask, torch DataLoader",
        ("megatron-core",),
        ("torch", "megatron.core.datasets.gpt_dataset"),
        open_gpt,
    )
}
