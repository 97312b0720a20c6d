"""Tasks for models of transformers that do not predict the next token: ``task.target=toolkit.tasks.NAME``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
import xxhash
from torch import nn
from torch.nn import functional

from toolkit.data.evaluation import IGNORE_INDEX
from toolkit.engine.protocol import LOSS, MicroBatch
from toolkit.train.task import Task

LABELS = "labels"


class _CrossEntropyTask(Task):
    """The cross-entropy of integer ``labels`` that are not -100, of a model that returns ``logits``.

    The model gets every tensor of the micro-batch but the labels.
    """

    def units(self, batch: MicroBatch) -> int:
        return int((batch[LABELS] != IGNORE_INDEX).sum())

    def loss_sum(self, model: nn.Module, batch: MicroBatch) -> torch.Tensor:
        return self._cross_entropy(self.logits(model, batch), batch)

    def evaluate(self, model: nn.Module, batch: MicroBatch) -> Mapping[str, torch.Tensor]:
        """Return the loss and the accuracy; for metrics, logits as ``preds`` and labels as ``target``."""
        logits, labels = self.logits(model, batch), batch[LABELS]
        right = (logits.argmax(dim=-1) == labels).sum()
        return {
            LOSS: self._cross_entropy(logits, batch),
            "accuracy": right,
            "preds": logits,
            "target": labels,
        }

    def logits(self, model: nn.Module, batch: MicroBatch) -> torch.Tensor:
        """Return the logits [*labels.shape, classes]."""
        output: torch.Tensor = model(
            **{name: tensor for name, tensor in batch.items() if name != LABELS}
        ).logits
        return output

    def _cross_entropy(self, logits: torch.Tensor, batch: MicroBatch) -> torch.Tensor:
        return functional.cross_entropy(
            logits.float().flatten(0, -2), batch[LABELS].flatten(), ignore_index=IGNORE_INDEX, reduction="sum"
        )


class MaskedLanguageModelTask(_CrossEntropyTask):
    """Predict masked tokens from those on both sides (Devlin et al., 1810.04805, section 3.1), for text data
    and ``AutoModelForMaskedLM``.

    A chosen token is replaced by ``mask_token`` in 80% of cases and by a random token in 10%. What is masked
    follows from ``seed`` and the sample's number in the run, so it does not depend on the layout or on
    restarts, and a sample is masked differently each time it is read. In evaluations it follows from the
    tokens of the sample.

    Args:
        mask_token: id of the token that replaces others.
        vocab_size: random tokens are below it.
        probability: share of tokens that are predicted.
        special_tokens: ids that are never chosen.
    """

    unit = "token"

    def __init__(
        self,
        mask_token: int,
        vocab_size: int,
        probability: float = 0.15,
        special_tokens: Sequence[int] = (),
        seed: int = 0,
    ) -> None:
        if not 0 < probability <= 1:
            raise ValueError(f"probability={probability}; a share is in (0, 1]")
        self._mask_token, self._vocab_size, self._seed = mask_token, vocab_size, seed
        self._probability, self._special_tokens = probability, np.array(special_tokens, dtype=np.int64)

    def collate(self, samples: np.ndarray) -> Mapping[str, torch.Tensor]:
        """Mask int64 samples [micro_batch, sequence + 1], whose last token is not used."""
        tokens = samples[:, :-1]
        inputs, labels = tokens.copy(), np.full_like(tokens, IGNORE_INDEX)
        for row in range(len(tokens)):
            number = None if self.sample_numbers is None else int(self.sample_numbers[row])
            content = samples[row].tobytes() if number is None else number.to_bytes(8, "big")
            random = np.random.default_rng([self._seed, xxhash.xxh3_64_intdigest(content)])
            draws = random.random((3, tokens.shape[1]))
            eligible = (tokens[row] >= 0) & ~np.isin(tokens[row], self._special_tokens)
            chosen = eligible & (draws[0] < self._probability)
            labels[row, chosen] = tokens[row, chosen]
            inputs[row, chosen & (draws[1] < 0.8)] = self._mask_token
            replaced = chosen & (draws[1] >= 0.9)
            inputs[row, replaced] = (draws[2, replaced] * self._vocab_size).astype(np.int64)
        return {
            "input_ids": torch.from_numpy(np.maximum(inputs, 0)),
            "attention_mask": torch.from_numpy((tokens >= 0).astype(np.int64)),
            LABELS: torch.from_numpy(labels),
        }


class SequenceToSequenceTask(_CrossEntropyTask):
    """Predict a second sequence from a first, for ``AutoModelForSeq2SeqLM``.

    Samples of a dataset (``data.target``) are dicts with ``input_ids`` and ``labels``, which may have
    different lengths. In text data the first ``prefix`` of each sample is the input and the rest is
    predicted, as in the prefix objective of T5 (Raffel et al., 1910.10683, section 3.1.4).

    Args:
        pad_token: id that fills shorter inputs.
        prefix: share of a text sample that is the input.
    """

    unit = "token"

    def __init__(self, pad_token: int = 0, prefix: float = 0.5) -> None:
        if not 0 < prefix < 1:
            raise ValueError(f"prefix={prefix}; a share is in (0, 1)")
        self._pad_token, self._prefix = pad_token, prefix

    def collate(self, samples: Any) -> Mapping[str, torch.Tensor]:
        if isinstance(samples, np.ndarray):
            cut = max(1, round(self._prefix * (samples.shape[1] - 1)))
            inputs, labels = torch.from_numpy(samples[:, :cut]), torch.from_numpy(samples[:, cut:-1])
        else:
            inputs = pad([sample["input_ids"] for sample in samples], IGNORE_INDEX)
            labels = pad([sample[LABELS] for sample in samples], IGNORE_INDEX)
        real = inputs >= 0
        return {
            "input_ids": torch.where(real, inputs, self._pad_token),
            "attention_mask": real.long(),
            LABELS: labels.contiguous(),
        }

    def logits(self, model: nn.Module, batch: MicroBatch) -> torch.Tensor:
        """Return the logits. The model derives the decoder's input from the labels, shifted by one."""
        output: torch.Tensor = model(**batch, use_cache=False).logits
        return output


class ClassificationTask(_CrossEntropyTask):
    """Predict one label for each sample, for ``AutoModelForAudioClassification``,
    ``AutoModelForSequenceClassification`` or ``AutoModelForImageClassification``.

    Samples of a dataset (``data.target``) are dicts with an integer ``labels`` and what the model's
    processor returns: ``input_values`` (audio), ``input_features``, ``input_ids`` or ``pixel_values``.
    Shorter samples are filled up to the longest of the micro-batch, and masked.

    Args:
        pad: the value that fills shorter samples.
        attention_mask: whether the model gets an ``attention_mask`` [micro_batch, length].
    """

    def __init__(self, pad: float = 0.0, attention_mask: bool = True) -> None:
        self._pad, self._has_mask = pad, attention_mask

    def collate(self, samples: Any) -> Mapping[str, torch.Tensor]:
        batch = {
            name: pad([sample[name] for sample in samples], self._pad)
            for name in samples[0]
            if name != LABELS
        }
        if self._has_mask and "attention_mask" not in batch:
            lengths = torch.tensor([len(next(iter(sample.values()))) for sample in samples])
            longest = int(lengths.max())
            batch["attention_mask"] = (torch.arange(longest) < lengths[:, None]).long()
        return {**batch, LABELS: torch.tensor([int(sample[LABELS]) for sample in samples])}

    def logits(self, model: nn.Module, batch: MicroBatch) -> torch.Tensor:
        dtype = next(parameter.dtype for parameter in model.parameters() if parameter.is_floating_point())
        return super().logits(
            model,
            {
                name: tensor.to(dtype) if tensor.is_floating_point() else tensor
                for name, tensor in batch.items()
            },
        )


def pad(rows: Sequence[Any], value: float) -> torch.Tensor:
    """Stack arrays of equal shape but for their first dim, filled up to the longest with ``value``."""
    return nn.utils.rnn.pad_sequence(
        [torch.as_tensor(np.asarray(row)) for row in rows], batch_first=True, padding_value=value
    )
