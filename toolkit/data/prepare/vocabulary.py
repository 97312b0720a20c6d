"""The tokenizer of a preparation: any that transformers or tokenizers opens, or one trained on a sample of the input."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from toolkit.config.prepare import PrepareConfig
from toolkit.config.special_tokens import SpecialTokens
from toolkit.data.manifest import TokenizerInfo
from toolkit.data.prepare.keys import Keys
from toolkit.data.prepare.limits import check_size
from toolkit.data.prepare.plan import Plan
from toolkit.data.prepare.read import decoded, documents
from toolkit.data.tokens import tokenizer as bpe
from toolkit.data.tokens import tokenizer_copy
from toolkit.data.tokens.index import token_dtype
from toolkit.data.tokens.special_tokens import prepare_tokenizer
from toolkit.files import sync_folder
from toolkit.progress import Progress

if TYPE_CHECKING:
    from tokenizers import Tokenizer

SAMPLED_UNITS = 64


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """What a process needs of it. ``folder`` holds tokenizer.json."""

    folder: Path
    end_of_text: int
    dtype: np.dtype[Any]
    special_tokens: SpecialTokens

    def load(self) -> Tokenizer:
        """It encodes whole texts, without padding, and special tokens as ``special_tokens`` asks."""
        tokenizer = bpe.load(self.folder)
        prepare_tokenizer(tokenizer, self.special_tokens)
        return tokenizer


def ready_vocabulary(
    config: PrepareConfig, plan: Plan, work: Path, output: Path, progress: Progress
) -> TokenizerInfo:
    """``output/tokenizer``, made there by one rename unless it is there. Raises InputError where it cannot be."""
    if not (output / bpe.FOLDER).is_dir():
        new = work / "tokenizer.new"
        shutil.rmtree(new, ignore_errors=True)
        new.mkdir()
        if config.tokenizer.path is None:
            bpe.save(bpe.train_bpe(_sample(config, plan, progress), config.tokenizer.vocab_size), new)
        else:
            end, path = config.tokenizer.end_of_text, config.tokenizer.path
            tokenizer_copy.place(
                path,
                end,
                new,
                key="tokenizer.path",
                end_key="tokenizer.end_of_text",
                trust_remote_code=config.tokenizer.trust_remote_code,
            )
        (new / bpe.FOLDER).replace(output / bpe.FOLDER)
        sync_folder(output)
    return tokenizer_copy.info(output / bpe.FOLDER)


def vocabulary(folder: Path, info: TokenizerInfo, plan: Plan) -> Vocabulary:
    return Vocabulary(
        folder / info.folder,
        info.end_of_text,
        token_dtype(info.size),
        SpecialTokens[plan.recipe["special_tokens"]],
    )


def _sample(config: PrepareConfig, plan: Plan, progress: Progress) -> Iterator[str]:
    """Training documents from units that lie evenly over the input, the same share of bytes from each."""
    keys, wanted = Keys.of(plan), config.tokenizer.sample_mib << 20
    everything = 0 < plan.bytes <= wanted
    count = len(plan.units) if everything else min(len(plan.units), SAMPLED_UNITS)
    share = wanted if everything else -(-wanted // count)
    total = 0
    with progress.task("training the tokenizer", total=min(wanted, plan.bytes) or None, unit="B") as task:
        for number in range(count):
            taken = 0
            for document in documents(plan, plan.units[number * len(plan.units) // count]):
                if taken >= share or total >= wanted:
                    break
                check_size(document, plan.path(document.source))
                content, text = decoded(document.content)
                if content and not keys.is_validation(content):
                    yield text
                taken += len(content)
                total += len(content)
                task.advance(len(content))
