"""The tokenizer of a preparation: an existing one, or one trained on a sample of the input."""

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
from toolkit.data.prepare.document_keys import DocumentKeys
from toolkit.data.prepare.plan import PreparationPlan
from toolkit.data.prepare.read import check_memory, decode_document, read_documents
from toolkit.data.tokens.index import token_dtype
from toolkit.data.tokens.special_tokens import configure_tokenizer
from toolkit.data.tokens.tokenizer import (
    TOKENIZER_FOLDER,
    install_tokenizer,
    read_tokenizer,
    read_tokenizer_info,
    save_tokenizer,
    train_bpe,
)
from toolkit.files import sync_folder
from toolkit.progress import Progress

if TYPE_CHECKING:
    from tokenizers import Tokenizer

SAMPLED_UNITS = 64


@dataclass(frozen=True, slots=True)
class TokenizerSpec:
    """The settings that a tokenising process needs. ``folder`` contains tokenizer.json."""

    folder: Path
    end_of_text: int
    dtype: np.dtype[Any]
    special_tokens: SpecialTokens

    def load(self) -> Tokenizer:
        """Load the tokenizer, configured for whole texts without padding and for ``special_tokens``."""
        tokenizer = read_tokenizer(self.folder)
        configure_tokenizer(tokenizer, self.special_tokens)
        return tokenizer


def ensure_tokenizer(
    config: PrepareConfig, plan: PreparationPlan, work: Path, output: Path, progress: Progress
) -> TokenizerInfo:
    """Install or train ``output/tokenizer`` unless it exists; it appears by one rename. Raises InputError."""
    if not (output / TOKENIZER_FOLDER).is_dir():
        temporary = work / "tokenizer.new"
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir()
        if config.tokenizer.path is None:
            save_tokenizer(train_bpe(_sample(config, plan, progress), config.tokenizer.vocab_size), temporary)
        else:
            end_of_text, tokenizer_path = config.tokenizer.end_of_text, config.tokenizer.path
            install_tokenizer(
                tokenizer_path,
                end_of_text,
                temporary,
                key="tokenizer.path",
                end_key="tokenizer.end_of_text",
                trust_remote_code=config.tokenizer.trust_remote_code,
            )
        (temporary / TOKENIZER_FOLDER).replace(output / TOKENIZER_FOLDER)
        sync_folder(output)
    return read_tokenizer_info(output / TOKENIZER_FOLDER)


def tokenizer_spec(folder: Path, info: TokenizerInfo, plan: PreparationPlan) -> TokenizerSpec:
    return TokenizerSpec(
        folder / info.folder,
        info.end_of_text,
        token_dtype(info.size),
        SpecialTokens[plan.recipe["special_tokens"]],
    )


def _sample(config: PrepareConfig, plan: PreparationPlan, progress: Progress) -> Iterator[str]:
    """Yield training documents from units spread evenly over the input, equally many bytes from each."""
    keys, sample_bytes = DocumentKeys.from_plan(plan), config.tokenizer.sample_mib << 20
    whole_input = 0 < plan.bytes <= sample_bytes
    count = len(plan.units) if whole_input else min(len(plan.units), SAMPLED_UNITS)
    unit_bytes = sample_bytes if whole_input else -(-sample_bytes // count)
    total = 0
    with progress.task(
        "training the tokenizer", total=min(sample_bytes, plan.bytes) or None, unit="B"
    ) as task:
        for number in range(count):
            taken = 0
            for document in read_documents(plan, plan.units[number * len(plan.units) // count]):
                if taken >= unit_bytes or total >= sample_bytes:
                    break
                check_memory(document, plan.path(document.source))
                content, text = decode_document(document.content)
                if content and not keys.is_validation(content):
                    yield text
                taken += len(content)
                total += len(content)
                task.advance(len(content))
