"""Tokenizers of data folders: train a byte-level BPE tokenizer, or install an existing one."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from toolkit.config.special_tokens import SpecialTokens
from toolkit.data import hub
from toolkit.data.digest import hash_file
from toolkit.data.manifest import TOKENIZER_FILE, TokenizerInfo, read_manifest
from toolkit.data.manifest_file import MANIFEST_NAME
from toolkit.data.tokens.special_tokens import configure_tokenizer
from toolkit.errors import InputError, Problem
from toolkit.files import write_whole
from toolkit.paths import UnsafePath, inside

if TYPE_CHECKING:
    from tokenizers import Tokenizer


END_OF_TEXT = "<|endoftext|>"
TOKENIZER_FOLDER = "tokenizer"


def train_bpe(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """Train a byte-level BPE tokenizer of at most ``vocab_size`` tokens.

    The tokens are END_OF_TEXT (id 0), the 256 bytes, then merges by frequency. The same texts give the same
    tokenizer.
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


def save_tokenizer(tokenizer: Tokenizer, folder: Path) -> TokenizerInfo:
    """Save the tokenizer in ``folder/tokenizer`` in the form that transformers' AutoTokenizer opens."""
    target = folder / TOKENIZER_FOLDER
    target.mkdir()
    write_whole(target / TOKENIZER_FILE, tokenizer.to_str(pretty=True))
    # No limit on the length of a sequence: the model's configuration has its own.
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": END_OF_TEXT,
        "clean_up_tokenization_spaces": False,
    }
    write_whole(target / "tokenizer_config.json", json.dumps(config, indent=1) + "\n")
    end_of_text = tokenizer.token_to_id(END_OF_TEXT)
    assert end_of_text is not None, f"a tokenizer without {END_OF_TEXT}"
    return TokenizerInfo(
        TOKENIZER_FOLDER, hash_file(target / TOKENIZER_FILE).xxh3_128, tokenizer.get_vocab_size(), end_of_text
    )


def read_tokenizer(folder: Path) -> Tokenizer:
    """Load the tokenizer from ``DataManifest.tokenizer_folder``. Raises InputError if it is absent."""
    from tokenizers import Tokenizer

    file = folder / TOKENIZER_FILE
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


def encode_texts(
    tokenizer: Tokenizer,
    texts: Sequence[str],
    end_of_text: int,
    special_tokens: SpecialTokens = SpecialTokens.text,
) -> Iterator[npt.NDArray[np.int64]]:
    """Yield the tokens of each text followed by ``end_of_text``.

    The caller checks text that must be refused.
    """
    # The library's own threads encode. Without this setting it prints a warning in every later fork of this
    # process.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")
    configure_tokenizer(tokenizer, special_tokens)
    for encoding in tokenizer.encode_batch_fast(list(texts), add_special_tokens=False):
        yield np.array([*encoding.ids, end_of_text], dtype=np.int64)


TOKENIZER_CONFIG = "tokenizer_config.json"
COPIED = (TOKENIZER_FILE, TOKENIZER_CONFIG, "special_tokens_map.json", "chat_template.jinja")


def install_tokenizer(
    name: str,
    end_of_text: str | None,
    folder: Path,
    *,
    key: str,
    end_key: str,
    trust_remote_code: bool = False,
) -> TokenizerInfo:
    """Copy or convert a tokenizer into ``folder/tokenizer``, which must not exist.

    Args:
        name: a tokenizer.json, a folder with one or that AutoTokenizer opens, prepared data, or a hub id.
        end_of_text: the token that ends a document; None: the tokenizer's own eos token.
        key, end_key: the settings of the two, for error messages.
        trust_remote_code: allow Python code that comes with the tokenizer to run.

    Raises:
        InputError: there is no such tokenizer, it is of another kind, or the token that ends a text is
            unknown.
    """
    target = folder / TOKENIZER_FOLDER
    target.mkdir()
    path = Path(name)
    if (path / MANIFEST_NAME).is_file():
        path = read_manifest(path).tokenizer_folder
    if path.is_file():
        shutil.copyfile(path, target / TOKENIZER_FILE)
    elif (path / TOKENIZER_FILE).is_file():
        for file in COPIED:
            if (path / file).is_file():
                shutil.copyfile(_resolve(path, file, key), target / file)
    else:
        _fetch_tokenizer(name, target, key, trust_remote_code=trust_remote_code)
    _set_end_token(name, end_of_text, target, key, end_key)
    return read_tokenizer_info(target)


def _resolve(folder: Path, file: str, key: str) -> Path:
    try:
        return inside(folder, file)
    except UnsafePath as error:
        raise InputError(
            Problem(
                key,
                f"{key}={folder}: {error}",
                "the files of a tokenizer lie in its folder",
                "put the file itself there in place of the link",
            )
        ) from error


def read_tokenizer_info(folder: Path) -> TokenizerInfo:
    """Read the description of a tokenizer folder whose configuration names its eos token."""
    tokenizer = _load(folder / TOKENIZER_FILE, str(folder))
    ids = tokenizer.get_vocab(with_added_tokens=True)
    eos = _token_text(json.loads((folder / TOKENIZER_CONFIG).read_bytes())["eos_token"])
    return TokenizerInfo(
        TOKENIZER_FOLDER, hash_file(folder / TOKENIZER_FILE).xxh3_128, max(ids.values()) + 1, ids[eos]
    )


def _set_end_token(name: str, end_of_text: str | None, target: Path, key: str, end_key: str) -> None:
    """Check that the token that ends a text exists, and write it to the tokenizer's configuration."""
    tokenizer = _load(target / TOKENIZER_FILE, f"{key}={name}", key)
    config = (
        json.loads((target / TOKENIZER_CONFIG).read_text(encoding="utf-8"))
        if (target / TOKENIZER_CONFIG).is_file()
        else {}
    )
    end_token = end_of_text or _token_text(config.get("eos_token"))
    if end_token is None or tokenizer.token_to_id(end_token) is None:
        decoded = tokenizer.get_added_tokens_decoder().values()
        special = [token.content for token in decoded if token.special][:20]
        seen = f"{end_key}={end_of_text}" + (
            "" if end_of_text else f", and {name} names no token that ends a text"
        )
        remedy = f"write {end_key}=TOKEN; its special tokens are: {', '.join(special) or 'none'}"
        raise InputError(Problem(end_key, seen, "every document ends with a token of the tokenizer", remedy))
    if _token_text(config.get("eos_token")) != end_token or "tokenizer_class" not in config:
        config = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "clean_up_tokenization_spaces": False,
            **config,
            "eos_token": end_token,
        }
        write_whole(target / TOKENIZER_CONFIG, json.dumps(config, indent=1) + "\n")


def _load(file: Path, seen: str, key: str = "tokenizer") -> Any:
    from tokenizers import Tokenizer

    try:
        return Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises plain Exception
        remedy = "name a tokenizer.json, or a folder or hub id that has one"
        raise InputError(
            Problem(key, f"{seen}: {error}", "it is a tokenizer of the package tokenizers", remedy)
        ) from error


def _fetch_tokenizer(name: str, target: Path, key: str, *, trust_remote_code: bool) -> None:
    """Fetch with transformers from the hub, or convert a local folder with a vocabulary of another form."""
    is_local = Path(name).exists()
    if not is_local and (name.startswith((".", "/", "~")) or name.count("/") > 1 or name.endswith(".json")):
        remedy = f"correct it; {Path(name).absolute()} is absent"
        raise InputError(Problem(key, f"{key}={name}", "the tokenizer's file or folder must exist", remedy))
    if not is_local:
        hub.is_online()
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(name, trust_remote_code=trust_remote_code)
        if not tokenizer.is_fast:
            raise ValueError("it has no form that the package tokenizers can read")
        tokenizer.save_pretrained(str(target))
    except (OSError, ValueError, ImportError, KeyError) as error:
        if not trust_remote_code and "trust_remote_code" in str(error):
            allow = f"{key.rpartition('.')[0]}.trust_remote_code=true"
            raise InputError(
                Problem(
                    key,
                    f"{key}={name} needs Python code that comes with it",
                    "such code runs only if a key allows it",
                    f"read that code and write {allow}, or name a tokenizer that needs none",
                )
            ) from error
        message = " ".join(str(error).split())[:300] + ("" if is_local else hub.offline_hint())
        remedy = "name a tokenizer.json, or a folder or hub id that has one"
        rule = "the tokenizer can be opened by transformers' AutoTokenizer"
        raise InputError(Problem(key, f"{key}={name}: {message}", rule, remedy)) from error


def _token_text(token: Any) -> str | None:
    """Return the text of a special token in a configuration, which is a string or an object."""
    return token.get("content") if isinstance(token, dict) else token
