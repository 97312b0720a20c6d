"""The contenders of benchmarks/streaming.py by name; importing this imports none of them."""

from __future__ import annotations

from harness.contenders import (
    hf_datasets,
    litdata_tokens,
    megatron_indexed,
    memory_map,
    mosaic_streaming,
    toolkit_stream,
    webdataset_tar,
)
from harness.contenders.common import Contender

CONTENDERS: dict[str, Contender] = {
    **memory_map.CONTENDERS,
    **toolkit_stream.CONTENDERS,
    **hf_datasets.CONTENDERS,
    **megatron_indexed.CONTENDERS,
    **litdata_tokens.CONTENDERS,
    **mosaic_streaming.CONTENDERS,
    **webdataset_tar.CONTENDERS,
}
