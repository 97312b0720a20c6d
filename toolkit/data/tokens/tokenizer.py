"""Tokenizers of data folders: train a byte-level BPE tokenizer, or install an existing one."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from toolkit.config.special_tokens import SpecialTokens
from toolkit.data.digest import digest
from toolkit.data.manifest import TokenizerInfo
from toolkit.data.tokens.special_tokens import prepare_tokenizer
from toolkit.errors import InputError, Problem
from toolkit.files import write_whole

if TYPE_CHECKING:
    from tokenizers import Tokenizer

END_OF_TEXT = "<|endoftext|>"
FOLDER = "tokenizer"
FILE = "tokenizer.json"


def train_bpe(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """Train a byte-level BPE tokenizer of at most ``vocab_size`` tokens.

    The tokens are END_OF_TEXT (id 0), the 256 bytes, then merges by frequency. The same texts give the same tokenizer.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=[END_OF_TEXT], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def save(tokenizer: Tokenizer, folder: Path) -> TokenizerInfo:
    """Save the tokenizer in ``folder/tokenizer`` in the form that transformers' AutoTokenizer opens."""
    target = folder / FOLDER
    target.mkdir()
    write_whole(target / FILE, tokenizer.to_str(pretty=True))
    # No limit on the length of a sequence: the model's configuration has its own.
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": END_OF_TEXT,
        "clean_up_tokenization_spaces": False,
    }
    write_whole(target / "tokenizer_config.json", json.dumps(config, indent=1) + "\n")
    end_of_text = tokenizer.token_to_id(END_OF_TEXT)
    assert end_of_text is not None, f"a tokenizer without {END_OF_TEXT}"
    return TokenizerInfo(FOLDER, digest(target / FILE).xxh3_128, tokenizer.get_vocab_size(), end_of_text)


def load(folder: Path) -> Tokenizer:
    """Load the tokenizer from ``DataManifest.tokenizer_folder``. Raises InputError if it is absent."""
    from tokenizers import Tokenizer

    file = folder / FILE
    if not file.is_file():
        raise InputError(
            Problem(
                str(file),
                f"{file}: absent",
                "a tokenizer folder holds tokenizer.json",
                "prepare the data again",
            )
        )
    return Tokenizer.from_file(str(file))


def encode(
    tokenizer: Tokenizer,
    texts: Sequence[str],
    end_of_text: int,
    special_tokens: SpecialTokens = SpecialTokens.text,
) -> Iterator[npt.NDArray[np.int64]]:
    """Yield the tokens of each text followed by ``end_of_text``. The caller checks text that must be refused."""
    # The library's own threads encode. Without this setting it prints a warning in every later fork of this process.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")
    prepare_tokenizer(tokenizer, special_tokens)
    for encoding in tokenizer.encode_batch_fast(list(texts), add_special_tokens=False):
        yield np.array([*encoding.ids, end_of_text], dtype=np.int64)
