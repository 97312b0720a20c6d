"""A tokenizer that the user names, put into a folder."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from toolkit.data import hub
from toolkit.data.digest import digest
from toolkit.data.manifest import NAME, TokenizerInfo, read_manifest
from toolkit.data.tokens.tokenizer import FILE, FOLDER
from toolkit.errors import InputError, Problem
from toolkit.files import write_whole
from toolkit.paths import UnsafePath, inside

CONFIG = "tokenizer_config.json"
COPIED = (FILE, CONFIG, "special_tokens_map.json", "chat_template.jinja")


def place(
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
        InputError: there is no such tokenizer, it is of another kind, or the token that ends a text is unknown.
    """
    target = folder / FOLDER
    target.mkdir()
    path = Path(name)
    if (path / NAME).is_file():
        path = read_manifest(path).tokenizer_folder
    if path.is_file():
        shutil.copyfile(path, target / FILE)
    elif (path / FILE).is_file():
        for file in COPIED:
            if (path / file).is_file():
                shutil.copyfile(_inside(path, file, key), target / file)
    else:
        _fetch(name, target, key, trust_remote_code=trust_remote_code)
    _check_end(name, end_of_text, target, key, end_key)
    return info(target)


def _inside(folder: Path, file: str, key: str) -> Path:
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


def info(folder: Path) -> TokenizerInfo:
    """Read the description of a tokenizer folder whose configuration names its eos token."""
    tokenizer = _open(folder / FILE, str(folder))
    ids = tokenizer.get_vocab(with_added_tokens=True)
    eos = _text(json.loads((folder / CONFIG).read_bytes())["eos_token"])
    return TokenizerInfo(FOLDER, digest(folder / FILE).xxh3_128, max(ids.values()) + 1, ids[eos])


def _check_end(name: str, end_of_text: str | None, target: Path, key: str, end_key: str) -> None:
    """Check that the token that ends a text exists, and write it to the tokenizer's configuration."""
    tokenizer = _open(target / FILE, f"{key}={name}", key)
    config = json.loads((target / CONFIG).read_text(encoding="utf-8")) if (target / CONFIG).is_file() else {}
    end_token = end_of_text or _text(config.get("eos_token"))
    if end_token is None or tokenizer.token_to_id(end_token) is None:
        decoded = tokenizer.get_added_tokens_decoder().values()
        special = [token.content for token in decoded if token.special][:20]
        seen = f"{end_key}={end_of_text}" + (
            "" if end_of_text else f", and {name} names no token that ends a text"
        )
        remedy = f"write {end_key}=TOKEN; its special tokens are: {', '.join(special) or 'none'}"
        raise InputError(Problem(end_key, seen, "every document ends with a token of the tokenizer", remedy))
    if _text(config.get("eos_token")) != end_token or "tokenizer_class" not in config:
        config = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "clean_up_tokenization_spaces": False,
            **config,
            "eos_token": end_token,
        }
        write_whole(target / CONFIG, json.dumps(config, indent=1) + "\n")


def _open(file: Path, seen: str, key: str = "tokenizer") -> Any:
    from tokenizers import Tokenizer

    try:
        return Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises plain Exception
        remedy = "name a tokenizer.json, or a folder or hub id that has one"
        raise InputError(
            Problem(key, f"{seen}: {error}", "it is a tokenizer of the package tokenizers", remedy)
        ) from error


def _fetch(name: str, target: Path, key: str, *, trust_remote_code: bool) -> None:
    """Fetch with transformers: from the hub, or from a folder with a vocabulary of another form, which it converts."""
    is_local = Path(name).exists()
    if not is_local and (name.startswith((".", "/", "~")) or name.count("/") > 1 or name.endswith(".json")):
        remedy = f"correct it; {Path(name).absolute()} is absent"
        raise InputError(Problem(key, f"{key}={name}", "the tokenizer's folder or file is there", remedy))
    if not is_local:
        hub.online()
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
        message = " ".join(str(error).split())[:300] + ("" if is_local else hub.why_absent())
        remedy = "name a tokenizer.json, or a folder or hub id that has one"
        rule = "the tokenizer can be opened by transformers' AutoTokenizer"
        raise InputError(Problem(key, f"{key}={name}: {message}", rule, remedy)) from error


def _text(token: Any) -> str | None:
    """Return the text of a special token in a configuration, which is a string or an object."""
    return token.get("content") if isinstance(token, dict) else token
