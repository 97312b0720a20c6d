"""Strings of special tokens in text: refused by name, kept as text, or parsed as the token."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer

from tests.data.dataset_files import Corpus, config_of, make_corpus
from tests.data.sample_texts import documents_of, prepared, texts_of, use_small_units, write_gz, write_jsonl
from toolkit.config.data import DataConfig
from toolkit.config.prepare import InputFormat, PrepareConfig, TokenizerConfig
from toolkit.config.schema import RunConfig
from toolkit.config.special_tokens import SpecialTokens
from toolkit.data.checks import check_special_tokens, special_tokens_mode
from toolkit.data.dataset.tokenizer_pool import TokenizerPool
from toolkit.data.manifest import read_manifest
from toolkit.data.prepare.inspect import inspect
from toolkit.data.registry import prepare_data
from toolkit.data.tokens import tokenizer as bpe
from toolkit.errors import InputError
from toolkit.progress import Progress

CHATS = [f"<|user|>question {number}<|assistant|>answer{'<|user|>' * (number % 3)}" for number in range(40)]
COUNTS = {"<|assistant|>": 40, "<|user|>": sum(1 + number % 3 for number in range(40))}


@pytest.fixture(scope="module")
def chat_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> TokenizerConfig:
    tokenizer = bpe.train_bpe(["question answer user assistant 0 1 2 3 4 5 6 7 8 9"] * 3, 300)
    tokenizer.add_special_tokens(["<|user|>", "<|assistant|>"])
    file = tmp_path_factory.mktemp("chat") / "tokenizer.json"
    tokenizer.save(str(file))
    return TokenizerConfig(path=str(file), end_of_text=bpe.END_OF_TEXT)


def ids_of(folder: Path) -> Counter[str]:
    """Count each of the two tokens over all splits."""
    tokenizer = bpe.read_tokenizer(read_manifest(folder).tokenizer_folder)
    found = Counter(
        token
        for split in ("train", "validation")
        for document in documents_of(folder, split)
        for token in document
    )
    return Counter({content: found[tokenizer.token_to_id(content)] for content in COUNTS})


@pytest.mark.parametrize("workers", [1, pytest.param(2, marks=pytest.mark.full)])
def test_parse_makes_special_tokens_and_text_makes_none(
    workers: int, chat_tokenizer: TokenizerConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = write_jsonl(tmp_path / "chats.jsonl", CHATS)
    use_small_units(monkeypatch, unit=700, part=300, batch=200)
    for mode, expected in ((SpecialTokens.parse, COUNTS), (SpecialTokens.text, dict.fromkeys(COUNTS, 0))):
        manifest = prepared(
            source, tmp_path / mode.name, chat_tokenizer, special_tokens=mode, workers=workers
        )
        assert ids_of(manifest.folder) == Counter(expected)
        assert sorted(
            [*texts_of(manifest.folder, "train"), *texts_of(manifest.folder, "validation")]
        ) == sorted(CHATS)
        assert read_manifest(manifest.folder).special_tokens == COUNTS
        assert manifest.recipe["special_tokens"] == mode.name
        lines = "\n".join(inspect(PrepareConfig(inspect=str(manifest.folder)), Progress.silent()))
        assert f"<|user|> {COUNTS['<|user|>']} times (special_tokens={mode.name})" in lines


def test_special_tokens_are_refused_by_default_naming_the_document(
    chat_tokenizer: TokenizerConfig, tmp_path: Path
) -> None:
    texts = ["plain", "more <|assistant|> text"]
    plain = write_jsonl(tmp_path / "a" / "a.jsonl", texts)
    for folder in ("b", "c"):
        (tmp_path / folder).mkdir()
    write_gz(tmp_path / "b" / "b.jsonl.gz", plain.read_bytes())
    (tmp_path / "c" / "c.txt").write_text(texts[1])
    for folder, place in (
        ("a", f"a.jsonl, the line at byte {len(json.dumps({'id': 0, 'text': 'plain'})) + 1}"),
        ("b", "b.jsonl.gz, line 2"),
        ("c", "c.txt"),
    ):
        with pytest.raises(InputError) as caught:
            prepared(
                tmp_path / folder,
                tmp_path / f"out-{folder}",
                chat_tokenizer,
                validation=0.0,
                special_tokens=PrepareConfig(input="x").special_tokens,
            )
        (problem,) = caught.value.problems
        assert place in problem.seen
        assert "more <|assistant|> text" in problem.seen
        assert "special_tokens=parse" in problem.remedy
        assert "special_tokens=text" in problem.remedy
        made = prepared(
            tmp_path / folder,
            tmp_path / f"made-{folder}",
            chat_tokenizer,
            validation=0.0,
            special_tokens=SpecialTokens.parse,
        )
        assert made.special_tokens == {"<|assistant|>": 1}
    lines = tmp_path / "lines.txt"
    lines.write_text("plain\nbytes\n")  # the control: without such a string it is prepared by default
    assert not prepared(
        lines,
        tmp_path / "plain",
        chat_tokenizer,
        format=InputFormat.lines,
        special_tokens=SpecialTokens.refuse,
        validation=0.0,
    ).special_tokens


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Corpus]:
    with pytest.MonkeyPatch.context() as patch:
        yield make_corpus(tmp_path_factory.mktemp("corpus"), patch)


def test_tokenizer_processes_refuse_parse_or_keep_special_tokens(corpus: Corpus) -> None:
    """Test the tokenizer processes of data=dataset."""
    texts = [b"a plain text", f"before {bpe.END_OF_TEXT} after".encode()]
    text, ends = b"".join(texts), np.cumsum([len(part) for part in texts])
    found = {}
    for mode in SpecialTokens:
        encoders = TokenizerPool(
            corpus.tokenizer / bpe.TOKENIZER_FILE,
            end_of_text=corpus.end_of_text,
            dtype=np.dtype(np.uint16),
            held_out=0.0,
            special_tokens=mode,
            count=1,
        )
        try:
            if mode is SpecialTokens.refuse:
                with pytest.raises(InputError, match=r"(?s)begins 'before.*data\.special_tokens=parse"):
                    encoders.submit(lambda: (text, ends)).result()
                assert (
                    len(encoders.submit(lambda: (texts[0], ends[:1])).result()) == 1
                )  # the control: it still serves
            else:
                found[mode] = [
                    int((part == corpus.end_of_text).sum())
                    for part in encoders.submit(lambda: (text, ends)).result()
                ]
        finally:
            encoders.close()
    assert found == {SpecialTokens.text: [1, 1], SpecialTokens.parse: [1, 2]}


def test_a_dataset_run_refuses_special_tokens_in_its_evaluation_set(corpus: Corpus) -> None:
    config = config_of(corpus, path=str(corpus.folder / "splits"))
    config.eval.every, config.eval.sets = 1, ["test"]
    prepare_data(config, None, Progress.silent())
    config.data.special_tokens = SpecialTokens.refuse
    with pytest.raises(InputError, match=r"evaluation set test.*<\|endoftext\|>"):
        prepare_data(config, None, Progress.silent())


def test_other_special_tokens_mode_of_prepared_data_is_refused(
    chat_tokenizer: TokenizerConfig, tmp_path: Path
) -> None:
    source = write_jsonl(tmp_path / "chats.jsonl", CHATS)
    manifest = prepared(source, tmp_path / "data", chat_tokenizer, special_tokens=SpecialTokens.parse)
    data = DataConfig(name="prepared", path=str(manifest.folder))
    # How generate.py treats a prompt.
    assert special_tokens_mode(data, manifest.folder) is SpecialTokens.parse
    for asked, refused in (
        (SpecialTokens.refuse, False),
        (SpecialTokens.parse, False),
        (SpecialTokens.text, True),
    ):
        data.special_tokens = asked
        problem = check_special_tokens(RunConfig(data=data), manifest, data.path)
        assert (problem is not None) is refused


def test_encoding_keeps_no_setting_of_the_call_before(chat_tokenizer: TokenizerConfig) -> None:
    tokenizer = Tokenizer.from_file(str(chat_tokenizer.path))
    lengths = [
        len(next(bpe.encode_texts(tokenizer, ["<|user|>"], 0, mode)))
        for mode in (SpecialTokens.text, SpecialTokens.parse)
    ]
    assert lengths[1] == 2 < lengths[0]
