"""From text to shards: the same documents from every format, and bytes that do not depend on the work
units.

    pytest -m full tests/data/test_prepare.py     # memory, megatron-core's reader, the commands of the docs
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import xxhash
from hypothesis import given
from hypothesis import settings as examples
from hypothesis import strategies as st

from tests.data.sample_texts import (
    TEXTS,
    documents_of,
    files_of,
    is_validation_text,
    make_texts,
    prepared,
    texts_of,
    use_small_units,
    write_gz,
    write_jsonl,
    write_zst,
)
from toolkit.config.data import DataConfig
from toolkit.config.prepare import InputDatasetConfig, InputFormat, PrepareConfig, TokenizerConfig
from toolkit.config.schema import EvalConfig, RunConfig, TrainConfig
from toolkit.config.special_tokens import SpecialTokens
from toolkit.data.kinds.text import check_data
from toolkit.data.manifest import read_manifest
from toolkit.data.prepare import merge, report
from toolkit.data.prepare.document_keys import DocumentKeys, split_threshold
from toolkit.data.prepare.report import PreparationStatistics, draw_histogram
from toolkit.data.prepare.run import prepare
from toolkit.data.tokens import tokenizer as bpe
from toolkit.data.tokens.token_array import verify_tokens
from toolkit.errors import InputError
from toolkit.progress import Progress

ROOT = Path(__file__).resolve().parents[2]


# -- the same bytes


@pytest.mark.parametrize("deduplicate", [False, True])
def test_bytes_do_not_depend_on_work_units(
    deduplicate: bool, corpus: Path, tokenizer: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepared(corpus, tmp_path / "whole", tokenizer, deduplicate=deduplicate)
    use_small_units(monkeypatch)
    prepared(corpus, tmp_path / "cut", tokenizer, deduplicate=deduplicate, memory_mib=1)
    whole, cut = files_of(tmp_path / "whole"), files_of(tmp_path / "cut")
    assert whole == cut
    assert {
        "train-00000.bin",
        "train-00000.idx",
        "validation-00000.bin",
        "lengths.png",
        "report.json",
        "sources.json",
    } < whole.keys()
    assert not any(name.startswith(".") for name in whole)
    assert verify_tokens(tmp_path / "cut", Progress.silent()).tokenizer.ends_documents
    prepared(
        corpus, tmp_path / "seed", tokenizer, deduplicate=deduplicate, seed=1
    )  # the control: another seed gives another order
    other = files_of(tmp_path / "seed")
    assert other["train-00000.bin"] != whole["train-00000.bin"]
    assert sorted(texts_of(tmp_path / "seed", "train")) == sorted(texts_of(tmp_path / "whole", "train"))


def test_the_same_bytes_for_any_number_of_processes(
    corpus: Path, tokenizer: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepared(corpus, tmp_path / "one", tokenizer)
    use_small_units(monkeypatch)
    prepared(corpus, tmp_path / "many", tokenizer, workers=3)
    assert files_of(tmp_path / "many") == files_of(tmp_path / "one")


def test_shards_are_ranges_of_one_order(
    corpus: Path, tokenizer: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One shard or many, merged in slices or whole, contain the same sequence of documents."""
    prepared(corpus, tmp_path / "one", tokenizer)
    whole = merge.plan_shards
    monkeypatch.setattr(merge, "plan_shards", lambda receipts, size, _: whole(receipts, size, 3000))
    monkeypatch.setattr(
        merge.ShardPlan, "bounds", lambda piece, _, bounds=merge.ShardPlan.bounds: bounds(piece, 3)
    )
    use_small_units(monkeypatch)
    manifest = prepared(corpus, tmp_path / "many", tokenizer)
    assert len(manifest.splits["train"].shards) > 3
    for split in ("train", "validation"):
        assert documents_of(tmp_path / "many", split) == documents_of(tmp_path / "one", split)


def test_key_ranges_are_adjacent_and_complete() -> None:
    for of, slices in ((1, 1), (3, 1), (7, 5), (1000, 3)):
        found = [
            bounds for number in range(of) for bounds in merge.ShardPlan(0, number, of, 1).bounds(slices)
        ]
        assert (found[0][0], found[-1][1]) == (0, 1 << 64)
        assert all(before[1] == after[0] for before, after in pairwise(found))


# -- which documents, where


def test_every_document_is_in_its_split_once(corpus: Path, tokenizer: Path, tmp_path: Path) -> None:
    prepared(corpus, tmp_path / "all", tokenizer)
    wanted = Counter([*TEXTS, *TEXTS[:3]])
    found = {split: texts_of(tmp_path / "all", split) for split in ("train", "validation")}
    assert Counter([*found["train"], *found["validation"]]) == wanted
    assert all(
        is_validation_text(text) == (split == "validation")
        for split, texts in found.items()
        for text in texts
    )
    found = json.loads((tmp_path / "all" / "report.json").read_text())
    assert (found["read"], found["documents"], found["empty"], found["equal"]) == (304, 303, 1, 0)
    assert found["text_bytes"] == sum(len(text.encode()) for text in wanted.elements())
    assert found["tokens"] == sum(split.tokens for split in read_manifest(tmp_path / "all").splits.values())
    assert sum(count for _, count in found["histogram"]) == 303
    sources = json.loads((tmp_path / "all" / "sources.json").read_text())
    assert [(source["name"], source["documents"]) for source in sources] == [
        ("a.jsonl", 103),
        ("b/c.jsonl", 200),
    ]


def test_histogram_of_document_lengths_is_a_reproducible_picture(
    corpus: Path, tokenizer: Path, tmp_path: Path
) -> None:
    """``draw_histogram`` was imported before the fixture of this folder replaced it."""
    prepared(corpus, tmp_path / "data", tokenizer)
    found = json.loads((tmp_path / "data" / "report.json").read_text())
    statistics = PreparationStatistics(**{**found, "histogram": tuple(map(tuple, found["histogram"]))})
    for name in ("a.png", "b.png"):
        draw_histogram(statistics, tmp_path / name)
    picture = (tmp_path / "a.png").read_bytes()
    assert picture.startswith(b"\x89PNG")
    assert picture == (tmp_path / "b.png").read_bytes()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.png", "b.png", "data"]


def test_documents_are_shuffled_over_files(corpus: Path, tokenizer: Path, tmp_path: Path) -> None:
    prepared(corpus, tmp_path / "data", tokenizer, validation=0.0)
    assert "validation" not in read_manifest(tmp_path / "data").splits
    numbers = [int(text.split()[0]) for text in texts_of(tmp_path / "data", "train")]
    assert (
        0.4 < np.mean([before < after for before, after in pairwise(numbers)]) < 0.6
    )  # 1 if documents keep the order of the input


def test_deduplication_removes_equal_documents(
    corpus: Path, tokenizer: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Duplicates are removed within and across parts, by their text and not by tokens or names."""
    use_small_units(monkeypatch)
    prepared(corpus, tmp_path / "once", tokenizer, deduplicate=True)
    assert sorted(
        [*texts_of(tmp_path / "once", "train"), *texts_of(tmp_path / "once", "validation")]
    ) == sorted(TEXTS)
    assert json.loads((tmp_path / "once" / "report.json").read_text())["equal"] == 3


@given(st.data())
@examples(max_examples=8, deadline=None)
def test_deduplication_and_split_depend_only_on_content(
    tmp_path_factory: pytest.TempPathFactory, tokenizer: Path, data: st.DataObject
) -> None:
    """However often, where and in which parts duplicates occur, one of each remains, in the same split."""
    texts = data.draw(st.lists(st.text("ab \n\0é", min_size=1, max_size=6), min_size=4, max_size=30))
    seed, share = data.draw(st.integers(0, 2**32)), data.draw(st.sampled_from([0.2, 0.6]))
    folder = tmp_path_factory.mktemp("property")
    write_jsonl(folder / "in.jsonl", texts)
    with pytest.MonkeyPatch.context() as patch:
        use_small_units(
            patch, *data.draw(st.tuples(st.integers(20, 400), st.integers(1, 60), st.integers(1, 40)))
        )
        side = sides(texts, share)
        if all(side.values()):
            with pytest.raises(InputError, match="the split train gets a document"):
                prepared(
                    folder / "in.jsonl",
                    folder / "out",
                    tokenizer,
                    deduplicate=True,
                    seed=seed,
                    validation=share,
                )
            return
        prepared(
            folder / "in.jsonl", folder / "out", tokenizer, deduplicate=True, seed=seed, validation=share
        )
    train, validation = (texts_of(folder / "out", split) for split in ("train", "validation"))
    assert sorted(train) == sorted({text for text in texts if not side[text]})
    assert sorted(validation) == sorted({text for text in texts if side[text]})


def sides(texts: list[str], share: float) -> dict[str, bool]:
    """Validation gets the share's documents, or if there are none, the one with the smallest hash."""
    found = {text: is_validation_text(text, share) for text in texts}
    if not any(found.values()) and len(found) > 1:
        found[min(found, key=lambda text: xxhash.xxh3_128_digest(text.encode())[:8])] = True
    return found


@pytest.mark.parametrize("workers", [1, pytest.param(2, marks=pytest.mark.full)])
def test_two_documents_are_enough_for_a_validation_split(
    workers: int, tokenizer: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A share of 0.005 of a few documents is none, and training evaluates on validation."""
    use_small_units(monkeypatch, unit=600)
    texts = [text for text in TEXTS[:40] if not is_validation_text(text, 0.005)]
    chosen = min(texts, key=lambda text: xxhash.xxh3_128_digest(text.encode())[:8])
    source = write_jsonl(tmp_path / "in.jsonl", texts)
    prepared(source, tmp_path / "data", tokenizer, validation=0.005, workers=workers)
    assert texts_of(tmp_path / "data", "validation") == [chosen]
    assert sorted(texts_of(tmp_path / "data", "train")) == sorted(set(texts) - {chosen})
    enough = [
        *texts,
        *(text for text in make_texts(4000) if is_validation_text(text, 0.005)),
    ]  # the control: the share gives some
    prepared(
        write_jsonl(tmp_path / "enough.jsonl", enough),
        tmp_path / "enough",
        tokenizer,
        validation=0.005,
        workers=workers,
    )
    assert chosen not in texts_of(tmp_path / "enough", "validation")


def test_missing_validation_split_is_explained(tokenizer: Path, tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "in.jsonl", [TEXTS[0]] * 3)  # equal documents cannot be on both sides
    manifest = prepared(source, tmp_path / "data", tokenizer, validation=0.005)
    assert "validation" not in manifest.splits
    (line,) = [line for line in report.describe_preparation(manifest) if line.startswith("validation")]
    assert "write eval.every=0" in line
    data = DataConfig(name="prepared", path=str(manifest.folder))
    train = TrainConfig(sequence_length=8)
    assert check_data(RunConfig(data=data, train=train, eval=EvalConfig(every=5)), manifest)
    assert not check_data(RunConfig(data=data, train=train, eval=EvalConfig(every=0)), manifest)


@given(st.binary(), st.integers(0, 2**32), st.floats(0, 0.9), st.floats(0, 0.09))
def test_a_larger_validation_split_holds_the_smaller_one(
    content: bytes, seed: int, share: float, more: float
) -> None:
    smaller, larger = (
        DocumentKeys(seed=seed, validation_below=split_threshold(size), by_content=True)
        for size in (share, share + more)
    )
    assert not smaller.is_validation(content) or larger.is_validation(content)
    assert (
        smaller(content, "a", 1)[1]
        == DocumentKeys(seed=seed + 1, validation_below=split_threshold(share), by_content=False)(
            content, "b", 2
        )[1]
    )


# -- every form of input


def test_every_form_gives_the_same_documents(
    tokenizer: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import pyarrow
    import pyarrow.parquet
    from datasets import Dataset, DatasetDict

    use_small_units(monkeypatch)
    texts = [text.replace("\n", " ") for text in TEXTS[:60]]
    lines = "".join(f"{text}\n" for text in texts).encode()
    jsonl = write_jsonl(tmp_path / "plain" / "a.jsonl", texts).read_bytes()
    forms: dict[str, tuple[Path, dict[str, object]]] = {"jsonl": (tmp_path / "plain", {})}

    def form(name: str, **options: object) -> Path:
        (tmp_path / name).mkdir()
        forms[name] = tmp_path / name, options
        return tmp_path / name

    folder = form("text")
    for number, text in enumerate(texts):
        (folder / f"{number:02}.txt").write_text(text)
    (folder / ".hidden").write_text("not read")
    (form("lines", format=InputFormat.lines) / "a.txt").write_bytes(
        lines.replace(b"\n", b"\r\n").removesuffix(b"\r\n")
    )
    write_gz(form("lines.gz", format=InputFormat.lines) / "a.txt.gz", lines)
    write_gz(form("gz") / "a.jsonl.gz", jsonl)
    write_zst(form("zst") / "a.jsonl.zst", jsonl)
    table = pyarrow.table({"body": texts, "other": range(60)})
    pyarrow.parquet.write_table(table, form("parquet", text="body") / "a.parquet", row_group_size=7)
    Dataset.from_dict({"text": texts}).save_to_disk(form("saved", format=InputFormat.dataset), num_shards=3)
    mixed = DatasetDict(
        {"train": Dataset.from_dict({"text": ["no"]}), "test": Dataset.from_dict({"text": texts})}
    )
    mixed.save_to_disk(
        form("saved splits", format=InputFormat.dataset, dataset=InputDatasetConfig(split="test"))
    )
    folder = form("streamed", format=InputFormat.dataset)
    for number in range(3):
        write_jsonl(folder / f"{number}.jsonl", texts[number * 20 : number * 20 + 20])
    folder = form("together")
    write_jsonl(folder / "a.jsonl", texts[:20])
    write_zst(
        folder / "b.jsonl.zst", write_jsonl(tmp_path / "scratch" / "b.jsonl", texts[20:59]).read_bytes()
    )
    (folder / "c").mkdir()
    (folder / "c" / "d.txt").write_text(texts[59])

    made = {}
    for name, (source, options) in forms.items():
        manifest = prepared(source, tmp_path / "out" / name, tokenizer, deduplicate=True, **options)
        made[name] = [documents_of(manifest.folder, split) for split in ("train", "validation")]
    assert sorted(
        [*texts_of(tmp_path / "out" / "jsonl", "train"), *texts_of(tmp_path / "out" / "jsonl", "validation")]
    ) == sorted(texts)
    for name, found in made.items():  # by content, so in the same order too
        assert found == made["jsonl"], name


def test_a_pattern_chooses_files(corpus: Path, tokenizer: Path, tmp_path: Path) -> None:
    prepared(f"{corpus}/**/c.jsonl", tmp_path / "data", tokenizer)
    sources = json.loads((tmp_path / "data" / "sources.json").read_text())
    assert [source["name"] for source in sources] == ["b/c.jsonl"]


def test_invalid_utf8_is_replaced_and_counted(tokenizer: Path, tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "latin.txt").write_bytes(b"caf\xe9")
    (tmp_path / "in" / "half.jsonl").write_text(
        '{"text": "half \\ud800 pair"}\n{"text": "whole \\ud83d\\ude42 pair"}\n{"text": null}\n'
    )
    prepared(tmp_path / "in", tmp_path / "data", tokenizer, validation=0.0)
    assert sorted(texts_of(tmp_path / "data", "train")) == [
        "caf\N{REPLACEMENT CHARACTER}",
        "half \N{REPLACEMENT CHARACTER}\
\N{REPLACEMENT CHARACTER}\N{REPLACEMENT CHARACTER} pair",
        "whole 🙂 pair",
    ]
    found = json.loads((tmp_path / "data" / "report.json").read_text())
    assert (found["replaced"], found["empty"], found["read"]) == (2, 1, 4)


# -- tokenizers


def test_tokenizer_is_trained_on_training_documents(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = PrepareConfig(
        input=str(corpus),
        output=str(tmp_path / "data"),
        tokenizer=TokenizerConfig(vocab_size=300),
        workers=1,
        validation=0.3,
        special_tokens=SpecialTokens.text,
    )
    seen: list[str] = []
    train = bpe.train_bpe
    monkeypatch.setattr(
        "toolkit.data.prepare.tokenizer.train_bpe",
        lambda texts, size: train((seen.append(text) or text for text in texts), size),
    )
    manifest = prepare(config, Progress.silent())
    assert manifest.tokenizer.size == 300
    assert Counter(seen) == Counter(
        text for text in [*TEXTS, *TEXTS[:3]] if not is_validation_text(text, 0.3)
    )


def test_any_tokenizer_of_transformers(corpus: Path, tokenizer: Path, tmp_path: Path) -> None:
    """A folder that AutoTokenizer opens, with settings that would spoil documents: cut, padded, wrapped in
    special tokens.
    """
    from tokenizers import Tokenizer, processors
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    backend = Tokenizer.from_file(str(tokenizer))
    backend.add_special_tokens(["<s>", "</s>"])
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", backend.token_to_id("<s>"))]
    )
    backend.enable_truncation(5)
    backend.enable_padding(length=50)
    PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>").save_pretrained(tmp_path / "theirs")
    manifest = prepared(
        corpus, tmp_path / "data", TokenizerConfig(path=str(tmp_path / "theirs")), validation=0.0
    )
    assert manifest.tokenizer.end_of_text == backend.token_to_id("</s>") == 401
    assert sorted(texts_of(tmp_path / "data", "train")) == sorted([*TEXTS, *TEXTS[:3]])
    opened = AutoTokenizer.from_pretrained(manifest.tokenizer_folder)
    assert (opened.eos_token_id, len(opened)) == (401, manifest.tokenizer.size)


def test_inner_end_of_text_tokens_are_recorded(tmp_path: Path) -> None:
    """Inner end-of-text tokens are counted, not assumed absent."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = Tokenizer(models.WordLevel({"stop": 0, "go": 1}, unk_token="go"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    words.save(str(tmp_path / "tokenizer.json"))
    for text, ends in (("go go", True), ("go stop go", False)):
        write_jsonl(tmp_path / f"{ends}.jsonl", [text])
        given = TokenizerConfig(path=str(tmp_path / "tokenizer.json"), end_of_text="stop")
        assert (
            prepared(
                tmp_path / f"{ends}.jsonl", tmp_path / f"out-{ends}", given, validation=0.0
            ).tokenizer.ends_documents
            is ends
        )


# -- large, or with others


MEMORY = """
import sys
from pathlib import Path
from launch.prepare import main
from toolkit.data.prepare import tokenise
tokenise.PART_BYTES *= int(sys.argv[1])
assert main(sys.argv[2:]) == 0
# Not ru_maxrss: that begins with what the process had before exec, which is the parent's.
status = Path("/proc/self/status").read_text().splitlines()
print(next(line.split()[1] for line in status if line.startswith("VmHWM")))
"""


@pytest.mark.full
def test_memory_does_not_grow_with_the_input(tokenizer: Path, tmp_path: Path) -> None:
    """Peak memory of a process that does all the work on 20 MB and on 60 MB; and, as control, with parts of
    any size.
    """
    peaks = []
    text = " ".join(make_texts(400))
    for times, parts in ((1, 1), (3, 1), (3, 1000)):
        folder = tmp_path / f"in{times}"
        texts = [f"{number} {text[number % 999 : number % 999 + 8000]}" for number in range(2500 * times)]
        plain = write_jsonl(tmp_path / "scratch.jsonl", texts)
        folder.mkdir(exist_ok=True)
        write_gz(folder / "a.jsonl.gz", plain.read_bytes())  # cannot be read in ranges: one unit
        words = [
            f"input={folder}",
            f"output={tmp_path / f'out{len(peaks)}'}",
            "workers=1",
            "memory_mib=4",
            f"tokenizer.path={tokenizer}",
            "tokenizer.end_of_text='<|endoftext|>'",
            "special_tokens=text",
        ]
        command = [sys.executable, "-c", MEMORY, str(parts), *words]
        done = subprocess.run(command, capture_output=True, text=True, timeout=280, check=True, cwd=ROOT)
        peaks.append(int(done.stdout.split()[-1]) / 1024)
    print("peak RSS, MiB:", [round(peak) for peak in peaks])
    assert peaks[1] - peaks[0] < 20, peaks
    assert peaks[1] < 300, peaks
    assert peaks[2] - peaks[1] > 40, peaks


MEGATRON = """
import sys
import numpy
from megatron.core.datasets.indexed_dataset import IndexedDataset
read = IndexedDataset(sys.argv[1])
print(len(read), [numpy.asarray(read[number]).tolist() for number in range(len(read))])
"""


@pytest.mark.full
def test_megatron_reads_the_prepared_documents(corpus: Path, tokenizer: Path, tmp_path: Path) -> None:
    pytest.importorskip("megatron.core", reason="the extra `megatron` is not installed")
    prepared(corpus, tmp_path / "data", tokenizer)
    command = [sys.executable, "-c", MEGATRON, str(tmp_path / "data" / "train-00000")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    documents = documents_of(tmp_path / "data", "train")
    assert done.stdout.splitlines()[-1] == f"{len(documents)} {documents}"
