"""The size of the training data in samples, from which the plan derives ``train.epochs``."""

from __future__ import annotations

from toolkit.config.schema import RunConfig
from toolkit.data.manifest import read_manifest
from toolkit.data.order.samples import split_too_short
from toolkit.data.records.reader import read_record_manifest
from toolkit.data.tokens.stdlib import ensure_stdlib
from toolkit.errors import InputError, Problem


def samples_per_epoch(config: RunConfig) -> int:
    """Return the samples of one epoch, at most ``data.max_samples``. Reads the manifest; makes
    ``data=stdlib``.

    Raises:
        InputError: the data are absent, shorter than one sample, or of a kind without a known size.
    """
    data, length = config.data, config.train.sequence_length
    if data.name == "arrays":
        count = read_record_manifest(data.path).split("train").records
    elif data.name in ("stdlib", "prepared"):
        stdlib = data.name == "stdlib"
        manifest = ensure_stdlib(data.path, data.vocab_size) if stdlib else read_manifest(data.path)
        tokens = manifest.split("train").tokens
        if tokens < length + 1:
            raise InputError(split_too_short(tokens, length))
        count = tokens // length
    else:
        raise InputError(
            Problem(
                "train.epochs",
                f"train.epochs={config.train.epochs}, data.name={data.name}",
                f"the number of samples of data={data.name} is not known before the run",
                f"write train.epochs=null train.steps={config.train.steps}",
            )
        )
    return min(count, data.max_samples or count)
