"""The tokenizer of a run on a dataset: found by ``data.dataset.tokenizer``, put beside the evaluation sets as every data folder has it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

from toolkit.config.data import DatasetConfig
from toolkit.data.dataset import hub
from toolkit.data.digest import digest
from toolkit.data.manifest import NAME, TokenizerInfo, read_manifest
from toolkit.data.tokenizer import FILE, FOLDER
from toolkit.errors import InputError, Problem
from toolkit.files import write_whole

if TYPE_CHECKING:
    from tokenizers import Tokenizer

CONFIG = "tokenizer_config.json"
COPIED = (FILE, CONFIG, "special_tokens_map.json", "chat_template.jinja")
KEY = "data.dataset.tokenizer"


def place(data: DatasetConfig, folder: Path) -> TokenizerInfo:
    """Into ``folder/tokenizer``, which opens with transformers' AutoTokenizer.

    Raises:
        InputError: there is no such tokenizer, it is of another kind, or which token ends a text is not known.
    """
    target = folder / FOLDER
    target.mkdir()
    if data.tokenizer is None:
        remedy = "write data.dataset.tokenizer=FOLDER, tokenizer.json or NAME/ON-THE-HUB"
        raise InputError(Problem(KEY, f"{KEY} is null", "data=dataset makes tokens of text on the way", remedy))
    path = Path(data.tokenizer)
    if (path / NAME).is_file():
        path = read_manifest(path).tokenizer_folder
    if path.is_file():
        shutil.copyfile(path, target / FILE)
    elif (path / FILE).is_file():
        for name in COPIED:
            if (path / name).is_file():
                shutil.copyfile(path / name, target / name)
    else:
        _fetch(data.tokenizer, target)
    tokenizer = _open(data, target / FILE)
    config = json.loads((target / CONFIG).read_text(encoding="utf-8")) if (target / CONFIG).is_file() else {}
    word = data.end_of_text or _text(config.get("eos_token"))
    end_of_text = tokenizer.token_to_id(word) if word is not None else None
    if end_of_text is None:
        special = [token.content for token in tokenizer.get_added_tokens_decoder().values() if token.special][:20]
        seen = f"data.dataset.end_of_text={data.end_of_text}" if data.end_of_text else f"{data.tokenizer} names no token that ends a text"
        remedy = f"write data.dataset.end_of_text=TOKEN; its special tokens are: {', '.join(special) or 'none'}"
        raise InputError(Problem("data.dataset.end_of_text", seen, "every document ends with a token of the tokenizer", remedy))
    if _text(config.get("eos_token")) != word or "tokenizer_class" not in config:
        config = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False, **config, "eos_token": word}
        write_whole(target / CONFIG, json.dumps(config, indent=1) + "\n")
    size = max(tokenizer.get_vocab(with_added_tokens=True).values()) + 1
    return TokenizerInfo(FOLDER, digest(target / FILE).xxh3_128, size, end_of_text)


def _open(data: DatasetConfig, file: Path) -> Tokenizer:
    from tokenizers import Tokenizer

    try:
        return Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises plain Exception
        remedy = "name a tokenizer.json, or a folder or hub id that has one"
        raise InputError(Problem(KEY, f"{KEY}={data.tokenizer}: {error}", "it is a tokenizer of the package tokenizers", remedy)) from error


def _fetch(name: str, target: Path) -> None:
    """By transformers: of the hub, or a folder with a vocabulary of another form, which it converts."""
    here = Path(name).exists()
    if not here and (name.startswith((".", "/", "~")) or name.count("/") > 1 or name.endswith(".json")):
        remedy = f"correct it; {Path(name).absolute()} is absent"
        raise InputError(Problem(KEY, f"{KEY}={name}", "the tokenizer's folder or file is there", remedy))
    if not here:
        hub.online()
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(name)
        if not tokenizer.is_fast:
            raise ValueError("it has no form that the package tokenizers reads")
        tokenizer.save_pretrained(str(target))
    except (OSError, ValueError, ImportError, KeyError) as error:
        words = " ".join(str(error).split())[:300] + ("" if here else hub.why_absent())
        remedy = "name a tokenizer.json, or a folder or hub id that has one"
        rule = "the tokenizer can be opened by transformers' AutoTokenizer"
        raise InputError(Problem(KEY, f"{KEY}={name}: {words}", rule, remedy)) from error


def _text(token: Any) -> str | None:
    """A special token in a configuration is its text, or an object with it."""
    return token.get("content") if isinstance(token, dict) else token
