"""The tokenizer of a preparation: any that transformers or tokenizers opens, or one trained on a sample of the input."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from toolkit.config.prepare import PrepareConfig, TokenizerConfig
from toolkit.data import tokenizer as bpe
from toolkit.data.digest import digest
from toolkit.data.index import token_dtype
from toolkit.data.manifest import TokenizerInfo
from toolkit.data.prepare.keys import Keys
from toolkit.data.prepare.plan import Plan
from toolkit.data.prepare.read import decoded, documents
from toolkit.errors import InputError, Problem
from toolkit.files import sync_folder, write_whole
from toolkit.progress import Progress

if TYPE_CHECKING:
    from tokenizers import Tokenizer

CONFIG = "tokenizer_config.json"
SAMPLED_UNITS = 64


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """What a process needs of it. ``folder`` holds tokenizer.json."""

    folder: Path
    end_of_text: int
    dtype: np.dtype[Any]

    def load(self) -> Tokenizer:
        """Encodes text as it is: whole, without padding, and the text of special tokens as text."""
        tokenizer = bpe.load(self.folder)
        tokenizer.no_truncation()
        tokenizer.no_padding()
        tokenizer.encode_special_tokens = True
        return tokenizer


def ready_vocabulary(config: PrepareConfig, plan: Plan, work: Path, output: Path, progress: Progress) -> TokenizerInfo:
    """``output/tokenizer``, made there by one rename unless it is there. Raises InputError where it cannot be."""
    if not (output / bpe.FOLDER).is_dir():
        new = work / "tokenizer.new"
        shutil.rmtree(new, ignore_errors=True)
        new.mkdir()
        if config.tokenizer.path is None:
            bpe.save(bpe.train_bpe(_sample(config, plan, progress), config.tokenizer.vocab_size), new)
        else:
            _copy(config.tokenizer, config.tokenizer.path, new / bpe.FOLDER)
        (new / bpe.FOLDER).replace(output / bpe.FOLDER)
        sync_folder(output)
    return _info(output / bpe.FOLDER)


def vocabulary(folder: Path, info: TokenizerInfo) -> Vocabulary:
    return Vocabulary(folder / info.folder, info.end_of_text, token_dtype(info.size))


def _info(folder: Path) -> TokenizerInfo:
    tokenizer = bpe.load(folder)
    eos = json.loads((folder / CONFIG).read_bytes())["eos_token"]
    token = eos["content"] if isinstance(eos, dict) else eos
    ids = tokenizer.get_vocab(with_added_tokens=True)
    return TokenizerInfo(bpe.FOLDER, digest(folder / bpe.FILE).xxh3_128, max(len(ids), max(ids.values()) + 1), ids[token])


def _copy(config: TokenizerConfig, path: str, target: Path) -> None:
    """A folder that transformers' AutoTokenizer opens, whose eos_token ends documents."""
    if Path(path).is_file():
        target.mkdir()
        shutil.copyfile(path, target / bpe.FILE)
        known, token = bpe.load(target).get_vocab(with_added_tokens=True), config.end_of_text
        if token in known:
            settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": token, "clean_up_tokenization_spaces": False}
            write_whole(target / CONFIG, json.dumps(settings, indent=1) + "\n")
    else:
        known, token = _from_transformers(config, path, target)
    if token not in known:
        seen = f"tokenizer.path={path} tokenizer.end_of_text={config.end_of_text}"
        rule = "a token of the tokenizer ends every document" + (f"; {token} is none of it" if token else "; it names no eos token itself")
        raise InputError(Problem("tokenizer.end_of_text", seen, rule, "write tokenizer.end_of_text=TOKEN with one of its special tokens"))


def _from_transformers(config: TokenizerConfig, path: str, target: Path) -> tuple[dict[str, int], str | None]:
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(path)
    except (OSError, ValueError, KeyError) as error:
        seen = f"tokenizer.path={path}: {str(error).splitlines()[0]}"
        rule, remedy = "a folder or hub id that AutoTokenizer opens, or a tokenizer.json", "mend the path"
        raise InputError(Problem("tokenizer.path", seen, rule, remedy)) from error
    if not tokenizer.is_fast:
        seen, rule = f"tokenizer.path={path}: {type(tokenizer).__name__}", "the tokenizer is one of the package tokenizers (tokenizer.json)"
        raise InputError(Problem("tokenizer.path", seen, rule, "convert it to a tokenizer.json first"))
    known = tokenizer.get_vocab()
    if config.end_of_text in known:
        tokenizer.eos_token = config.end_of_text
    tokenizer.save_pretrained(target)
    return known, config.end_of_text or tokenizer.eos_token


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
                content, text = decoded(document.content)
                if content and not keys.is_validation(content):
                    yield text
                taken += len(content)
                total += len(content)
                task.advance(len(content))
