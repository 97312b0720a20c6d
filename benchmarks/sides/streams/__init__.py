"""The contenders of benchmarks/streaming.py by name; importing this imports none of them."""

from __future__ import annotations

from sides.streams import floor, hf, litdata_tokens, megatron, mosaic, ours, webdataset_tar
from sides.streams.common import Contender

SIDES: dict[str, Contender] = {
    **floor.SIDES,
    **ours.SIDES,
    **hf.SIDES,
    **megatron.SIDES,
    **litdata_tokens.SIDES,
    **mosaic.SIDES,
    **webdataset_tar.SIDES,
}
