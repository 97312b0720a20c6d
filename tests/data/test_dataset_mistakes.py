"""Refusals of a run on a dataset before it starts, in bounded time if the hub does not answer."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.data.dataset_files import Corpus, config_of, make_corpus
from toolkit.config.schema import BatchRampConfig, RunConfig
from toolkit.data import hub
from toolkit.data.registry import prepare_data
from toolkit.errors import ConfigError, InputError
from toolkit.progress import Progress


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Corpus]:
    with pytest.MonkeyPatch.context() as patch:
        yield make_corpus(tmp_path_factory.mktemp("corpus"), patch)


def refusal(config: RunConfig, vocab_size: int | None = None) -> str:
    with pytest.raises(InputError) as caught:
        prepare_data(config, vocab_size, Progress.silent())
    left = [path.name for path in Path(config.data.path).glob(".*.partial")]
    assert not left
    (problem,) = caught.value.problems
    return f"{problem.seen} | {problem.rule} | {problem.remedy}"


@pytest.fixture
def offline() -> Iterator[pytest.MonkeyPatch]:
    """Set what HF_HUB_OFFLINE=1 sets."""
    import datasets
    from huggingface_hub import constants

    hub.is_online.cache_clear()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(constants, "HF_HUB_OFFLINE", True)
        patch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
        patch.delenv("HF_HUB_OFFLINE", raising=False)
        yield patch
    hub.is_online.cache_clear()


MISTAKES: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "no path": ({"path": None}, ("data.dataset.path=None", "write data.dataset.path=")),
    "absent file": (
        {"path": "absent/corpus.jsonl"},
        ("data.dataset.path=absent/corpus.jsonl", "absent/corpus.jsonl is absent"),
    ),
    "absent pattern": (
        {"path": "absent-*.jsonl"},
        ("data.dataset.path=absent-*.jsonl", "no file matches it"),
    ),
    "another ending": (
        {"path": "FOLDER/second/tokenizer/tokenizer.json.bak"},
        ("tokenizer.json.bak", ".jsonl"),
    ),
    "empty folder": ({"path": "FOLDER/empty"}, ("data.dataset.path=", "empty")),
    "split": ({"split": "dev"}, ("data.dataset.split=dev", "available: train")),
    "part of a split": (
        {"split": "train[:10%]"},
        ("data.dataset.split=train[:10%]", "name a whole split; available: train"),
    ),
    "configuration": ({"path": "FOLDER/splits", "name": "en"}, ("data.dataset.name=en", "not found")),
    "revision": ({"revision": "main"}, ("data.dataset.revision=main", "leave out data.dataset.revision")),
    "column": (
        {"text": ["text", "body"]},
        ("body (absent)", "write data.dataset.text=[title]; columns of text: title, text"),
    ),
    "no text": ({"text": ["number"]}, ("number (int64)", "with text")),
    "no column": ({"text": []}, ("no column", "write data.dataset.text=[title]")),
    "broken rows": ({"path": "FOLDER/broken.jsonl"}, ("broken.jsonl", "can be opened")),
    "no rows": ({"path": "FOLDER/none"}, ("0 rows", "name another split")),
    "no tokenizer": (
        {"tokenizer": None},
        ("data.dataset.tokenizer is null", "write data.dataset.tokenizer="),
    ),
    "absent tokenizer": (
        {"tokenizer": "absent/tokenizer.json"},
        ("data.dataset.tokenizer=absent/tokenizer.json", "is absent"),
    ),
    "tokenizer of another kind": (
        {"tokenizer": "FOLDER/corpus.jsonl"},
        ("data.dataset.tokenizer=", "package tokenizers"),
    ),
    "end of text": (
        {"tokenizer": "FOLDER/first/tokenizer/tokenizer.json"},
        ("names no token", "end_of_text=TOKEN", "<|endoftext|>"),
    ),
    "another end of text": ({"end_of_text": "</s>"}, ("data.dataset.end_of_text=</s>", "<|endoftext|>")),
    "streaming what is here": (
        {"path": "FOLDER/saved", "streaming": True},
        ("save_to_disk", "leave out data.dataset.streaming"),
    ),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes_name_key_and_remedy(corpus: Corpus, name: str) -> None:
    import datasets

    (corpus.folder / "empty").mkdir(exist_ok=True)
    (corpus.folder / "broken.jsonl").write_text('{"text": "a"}\n{"text": \n')
    (corpus.folder / "second" / "tokenizer" / "tokenizer.json.bak").write_text("{}")
    if name == "no rows":
        datasets.Dataset.from_dict({"text": []}).save_to_disk(str(corpus.folder / "none"))
    changes, words = MISTAKES[name]
    there = {
        key: value.replace("FOLDER", str(corpus.folder)) if isinstance(value, str) else value
        for key, value in changes.items()
    }
    message = refusal(config_of(corpus, **there))
    for word in words:
        assert word in message


def test_an_end_of_text_may_be_named(corpus: Corpus) -> None:
    """A tokenizer.json alone does not name its end-of-text token."""
    from transformers import AutoTokenizer

    file = str(corpus.tokenizer / "tokenizer.json")
    folder = prepare_data(
        config_of(corpus, tokenizer=file, end_of_text="<|endoftext|>"), None, Progress.silent()
    )
    assert AutoTokenizer.from_pretrained(f"{folder}/tokenizer").eos_token == "<|endoftext|>"


def test_the_tokenizer_of_a_data_folder_may_be_named(corpus: Corpus) -> None:
    first = prepare_data(config_of(corpus), None, Progress.silent())
    assert prepare_data(config_of(corpus, tokenizer=first), None, Progress.silent()) == first


def test_unmet_requirements_of_a_run_are_refused(corpus: Corpus) -> None:
    message = refusal(config_of(corpus), vocab_size=200)
    assert "model.vocab_size=200" in message or "the tokenizer of" in message
    assert "has 300 tokens" in message
    config = config_of(corpus)
    config.eval.every = 1
    message = refusal(config)
    assert "eval.sets=validation" in message
    assert "available: train; or hold documents out of training: data.dataset.validation=0.005" in message
    config.eval.sets = ["test"]
    assert "eval.sets=test" in refusal(config)
    config = config_of(corpus, streaming=True)
    config.train.batch_ramp = BatchRampConfig(start=2, increment=2, samples=10)
    assert "leave out data.dataset.streaming or train.batch_ramp" in refusal(config)
    config = config_of(corpus)
    config.data.path = str(corpus.folder / "corpus.jsonl")
    assert "can be written there" in refusal(config)


@pytest.mark.parametrize(("key", "value"), [("workers", 0), ("validation", 0.7)])
def test_values_out_of_range_are_rejected(corpus: Corpus, key: str, value: float) -> None:
    with pytest.raises(ConfigError, match=rf"data\.dataset\.{key}"):
        config_of(corpus, **{key: value})


@pytest.mark.parametrize("key", ["path", "tokenizer"])
def test_a_hub_id_on_an_offline_machine(corpus: Corpus, offline: pytest.MonkeyPatch, key: str) -> None:
    began = time.monotonic()
    message = refusal(config_of(corpus, **{key: "somebody/something"}))
    assert f"data.dataset.{key}=somebody/something" in message
    assert "HF_HUB_OFFLINE" in message
    assert time.monotonic() - began < 30  # about one second on an idle machine


@pytest.mark.parametrize("answers", [True, False])
def test_unreachable_hub_is_probed_once_with_a_time_limit(
    corpus: Corpus, offline: pytest.MonkeyPatch, answers: bool, free_port: Callable[[], socket.socket]
) -> None:
    """One port is closed; the other accepts connections and never answers."""
    from huggingface_hub import constants

    silent = free_port()
    if answers:
        silent.listen()
    offline.setattr(constants, "HF_HUB_OFFLINE", False)
    offline.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{silent.getsockname()[1]}")
    offline.setattr(hub, "CONNECT_SECONDS", 0.2)
    offline.setattr(hub, "WAIT_SECONDS", 0.5)
    began = time.monotonic()
    message = refusal(config_of(corpus, path="somebody/something"))
    assert "does not answer" in message
    assert constants.HF_HUB_OFFLINE
    assert time.monotonic() - began < 30


@pytest.fixture
def free_port() -> Iterator[Callable[[], socket.socket]]:
    """Bind a port without listening."""
    opened: list[socket.socket] = []

    def bound() -> socket.socket:
        opened.append(socket.socket())
        opened[-1].bind(("127.0.0.1", 0))
        return opened[-1]

    yield bound
    for one in opened:
        one.close()


def test_a_dataset_of_the_hub_that_was_fetched_before(
    corpus: Corpus, offline: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The cache is in the state in which `datasets` leaves it; there is no network."""
    import datasets

    cache = tmp_path / "hub"
    offline.setattr(datasets.config, "HF_DATASETS_CACHE", str(cache))
    builder = datasets.load_dataset_builder("json", data_files={"train": str(corpus.folder / "corpus.jsonl")})
    builder.download_and_prepare()
    (made,) = cache.glob("json/*/*/*/dataset_info.json")
    commit = "0123456789abcdef0123456789abcdef01234567"
    target = cache / "somebody___something" / "default" / "0.0.0" / commit
    target.mkdir(parents=True)
    for file in made.parent.iterdir():
        (target / file.name.replace("json-", "something-")).write_bytes(file.read_bytes())
    info = json.loads((target / "dataset_info.json").read_text())
    info |= {"builder_name": "json", "dataset_name": "something", "config_name": "default"}
    info["splits"]["train"]["dataset_name"] = "something"
    (target / "dataset_info.json").write_text(json.dumps(info))
    folder = prepare_data(config_of(corpus, path="somebody/something"), None, Progress.silent())
    source = json.loads((Path(folder) / "source.json").read_text())
    assert source["revision"] == commit
    assert source["files"] == [str(target / "something-train.arrow")]
