"""Preparation of datasets from a recipe, and their cache."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shardwright.config import Recipe
from shardwright.config.data import IGNORED_LABEL
from shardwright.data import dataset_assembly
from shardwright.data.dataset import TokenDataset, WindowDataset
from shardwright.data.packed_dataset import PackedDataset
from shardwright.data.preparation import prepare_data
from shardwright.data.prepared_data import PreparedData
from shardwright.data.sources import source_files, source_reader
from shardwright.data.sources.file_listing import list_files
from shardwright.data.tokens import tokenisation
from shardwright.data.tokens.tokenizer_loading import load_tokenizer
from shardwright.errors import DataError, RecipeError, TokenizerError
from tests.unit.data.recipes import build_recipe, story, write_json_lines, write_text
from tests.unit.data.test_tokenizer import save_folder, sentencepiece_like

ROOT = Path(__file__).parents[3]
STORIES = [story(number) for number in range(120)]


def write_stories(folder: Path) -> str:
    return write_json_lines(folder / "stories.jsonl", STORIES)


def decode_tokens(prepared: PreparedData, dataset: TokenDataset | None) -> str:
    assert isinstance(dataset, WindowDataset | PackedDataset)
    return prepared.tokenizer.decode(dataset.tokens.tolist())


def list_supervised_texts(prepared: PreparedData, dataset: PackedDataset) -> list[str]:
    """List each piece of every row as text: its first token and its labels."""
    texts = []
    for index in range(len(dataset)):
        sample = dataset.get_sample(index)
        assert sample.document_ids is not None
        for number in range(int(sample.document_ids.max()) + 1):
            is_supervised = (sample.document_ids == number) & (sample.labels != IGNORED_LABEL)
            if is_supervised.any():
                texts.append(
                    prepared.tokenizer.decode(
                        [
                            int(sample.input_ids[is_supervised][0]),
                            *sample.labels[is_supervised].tolist(),
                        ]
                    )
                )
    return texts


def test_the_published_character_data_is_reproduced(outside_data: Path, tmp_path: Path) -> None:
    path = str(outside_data / "text" / "tinyshakespeare.txt")
    recipe = build_recipe(
        tmp_path, path, length=64, validation_fraction=0.1, validation_split="tail"
    )
    prepared = prepare_data(recipe, 65)
    assert prepared.tokenizer.vocab_size == 65
    assert isinstance(prepared.train, WindowDataset)
    assert isinstance(prepared.validation, WindowDataset)
    assert (len(prepared.train.tokens), len(prepared.validation.tokens)) == (1_003_854, 111_540)
    text = Path(path).read_text(encoding="utf-8")
    assert decode_tokens(prepared, prepared.train) == text[:1_003_854]
    assert decode_tokens(prepared, prepared.validation) == text[1_003_854:]


def test_samples_contain_the_tokens_of_the_sources(tmp_path: Path) -> None:
    path = write_json_lines(tmp_path / "a.jsonl", ["cab", "bad"])
    prepared = prepare_data(build_recipe(tmp_path, path, length=4))
    sample = prepared.train.get_sample(0)
    assert prepared.tokenizer.decode(sample.input_ids.tolist()) in ("caba", "abba", "bbad")
    assert (
        prepared.report.train.counts.num_tokens == prepared.report.train.counts.num_characters == 6
    )
    assert prepared.validation is None


@pytest.mark.parametrize("tokenizer", ["character", {"kind": "bpe", "vocab_size": 300}])
def test_a_second_run_reads_no_source(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tokenizer: Any
) -> None:
    recipe = build_recipe(
        tmp_path,
        write_stories(tmp_path),
        tokenizer=tokenizer,
        validation_fraction=0.2,
        packing="documents",
    )
    first = prepare_data(recipe)
    monkeypatch.setattr(source_files, "scan_records", None)
    monkeypatch.setattr(tokenisation, "write_tokens", None)
    monkeypatch.setattr(dataset_assembly, "pack_documents", None)
    second = prepare_data(recipe)
    assert second.report == first.report
    assert second.content_hash == first.content_hash
    assert second.tokenizer.content_hash == first.tokenizer.content_hash
    for side in ("train", "validation"):
        datasets_first = getattr(first, side)
        datasets_second = getattr(second, side)
        for index in range(len(datasets_first)):
            for a, b in zip(
                datasets_first.get_sample(index), datasets_second.get_sample(index), strict=True
            ):
                assert np.array_equal(np.asarray(a), np.asarray(b))


@pytest.mark.parametrize(
    "change",
    [
        {"validation_fraction": 0.3},
        {"validation_split": "tail"},
        {"packing": "documents"},
        {"tokenizer": {"kind": "bpe", "vocab_size": 290}},
        {"sources": "other"},
    ],
    ids=lambda change: next(iter(change)),
)
def test_options_that_change_samples_change_the_hash(
    tmp_path: Path, change: dict[str, Any]
) -> None:
    base: dict[str, Any] = {"sources": write_stories(tmp_path), "validation_fraction": 0.2}
    other = write_json_lines(tmp_path / "other.jsonl", [*STORIES[:-1], "changed"])
    changed = base | ({"sources": other} if change.get("sources") else change)
    hashes = [
        prepare_data(build_recipe(tmp_path, **keys)).content_hash for keys in (base, changed, base)
    ]
    assert hashes[0] == hashes[2] != hashes[1]


def test_a_bpe_is_not_trained_on_validation_text(tmp_path: Path) -> None:
    training = write_json_lines(tmp_path / "train.jsonl", STORIES)
    validation = write_json_lines(
        tmp_path / "validation.jsonl", [f"zqzqzq {number} zqzqzq" for number in range(200)]
    )
    recipe = build_recipe(
        tmp_path, training, tokenizer={"kind": "bpe", "vocab_size": 400}, validation=validation
    )
    prepared = prepare_data(recipe)
    tokens = [prepared.tokenizer.decode([index]) for index in range(prepared.tokenizer.vocab_size)]
    assert not any("zq" in token for token in tokens)
    assert any(" w" in token for token in tokens)
    prepared_from_both = prepare_data(
        build_recipe(tmp_path, [training, validation], tokenizer={"kind": "bpe", "vocab_size": 400})
    )
    assert any("zq" in prepared_from_both.tokenizer.decode([index]) for index in range(400)), (
        "no token has `zq`, so the test cannot fail"
    )


def test_the_character_vocabulary_covers_validation(tmp_path: Path) -> None:
    training = write_text(tmp_path / "a.txt", "abcabcabc")
    validation = write_text(tmp_path / "b.txt", "abxy")
    assert (
        prepare_data(
            build_recipe(tmp_path, training, length=4, validation=validation)
        ).tokenizer.vocab_size
        == 5
    )


def test_validation_documents_are_in_no_training_sample(tmp_path: Path) -> None:
    recipe = build_recipe(
        tmp_path,
        write_json_lines(tmp_path / "a.jsonl", STORIES * 2),
        tokenizer={"kind": "bpe", "vocab_size": 300},
        length=64,
        validation_fraction=0.2,
        packing="documents",
    )
    prepared = prepare_data(recipe)
    assert isinstance(prepared.train, PackedDataset)
    assert isinstance(prepared.validation, PackedDataset)
    train = list_supervised_texts(prepared, prepared.train)
    validation = list_supervised_texts(prepared, prepared.validation)
    assert sorted(train + validation) == sorted(text + "<|endoftext|>" for text in STORIES * 2)
    assert not set(train) & set(validation)
    assert validation


def test_packed_documents_have_prefix_and_suffix_tokens(tmp_path: Path) -> None:
    folder = save_folder(sentencepiece_like(), tmp_path / "tokenizer", eos_token="</s>")
    path = write_json_lines(tmp_path / "a.jsonl", ["ab", "a", "bb"])
    tokenizer = {"kind": "huggingface", "path": str(folder)}
    prepared = prepare_data(
        build_recipe(tmp_path, path, tokenizer=tokenizer, packing="documents"), 6
    )
    assert isinstance(prepared.train, PackedDataset)
    assert sorted(list_supervised_texts(prepared, prepared.train)) == [
        "<s> a</s>",
        "<s> ab</s>",
        "<s> bb</s>",
    ]


def test_reading_in_pieces_gives_the_same_ids(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = "\n".join(f"{story(number)}\n\n    indented {number}" for number in range(300))
    path = write_text(tmp_path / "a.txt", text)
    with_prefix = save_folder(sentencepiece_like(), tmp_path / "tokenizer", eos_token="</s>")
    for tokenizer in (
        {"kind": "bpe", "vocab_size": 350},
        {"kind": "huggingface", "path": str(with_prefix)},
    ):
        whole = prepare_data(build_recipe(tmp_path / "whole", path, tokenizer=tokenizer))
        with monkeypatch.context() as patch:
            patch.setattr(source_reader, "PIECE_NUM_CHARACTERS", 256)
            recipe = build_recipe(tmp_path / "pieces", path, tokenizer=tokenizer)
            assert (
                len(list(source_reader.read_files(list_files(recipe.data.sources, "data.sources"))))
                > 20
            )
            pieces = prepare_data(recipe)
        assert isinstance(whole.train, WindowDataset)
        assert isinstance(pieces.train, WindowDataset)
        assert np.array_equal(whole.train.tokens, pieces.train.tokens)


def test_a_tail_split_has_end_of_text_only_at_true_ends(tmp_path: Path) -> None:
    path = write_text(tmp_path / "a.txt", STORIES[0] * 20)
    tokenizer = {"kind": "bpe", "vocab_size": 300}
    prepared = prepare_data(
        build_recipe(
            tmp_path, path, tokenizer=tokenizer, validation_fraction=0.5, validation_split="tail"
        )
    )
    assert "<|endoftext|>" not in decode_tokens(prepared, prepared.train)
    assert decode_tokens(prepared, prepared.validation).endswith("<|endoftext|>")
    assert prepared.report.validation is not None
    assert prepared.report.validation.counts.num_documents == 1


def test_a_tokenizer_larger_than_the_model_is_refused(tmp_path: Path) -> None:
    recipe = build_recipe(tmp_path, write_stories(tmp_path))
    size = prepare_data(recipe).tokenizer.vocab_size
    prepare_data(recipe, size)
    with pytest.raises(
        TokenizerError,
        match=rf"token id {size - 1} in stories.jsonl:1, from a tokenizer of {size} ids"
        rf".*vocab_size of {size - 1}",
    ):
        prepare_data(recipe, size - 1)


def test_only_tokens_that_occur_must_fit(tmp_path: Path) -> None:
    """Models often have fewer embedding rows than their tokenizer has reserved ids."""
    folder = save_folder(sentencepiece_like(), tmp_path / "tokenizer", eos_token="</s>")
    path = write_json_lines(tmp_path / "a.jsonl", ["aaaaaaaaaaaa"])
    recipe = build_recipe(tmp_path, path, tokenizer={"kind": "huggingface", "path": str(folder)})
    assert prepare_data(recipe, 5).tokenizer.vocab_size == 6


def test_large_vocabularies_take_four_bytes(tmp_path: Path) -> None:
    fast = sentencepiece_like()
    fast.add_tokens([f"<extra {number}>" for number in range(2**16)])
    folder = save_folder(fast, tmp_path / "tokenizer")
    path = write_json_lines(tmp_path / "a.jsonl", ["a" * 20, f"<extra {2**16 - 1}>"])
    prepared = prepare_data(
        build_recipe(tmp_path, path, tokenizer={"kind": "huggingface", "path": str(folder)})
    )
    assert prepared.report.train.counts.dtype == "<u4"
    assert prepared.report.train.counts.max_id == 2**16 + 5


def test_too_little_text_is_reported_with_numbers(tmp_path: Path) -> None:
    with pytest.raises(
        DataError,
        match=r"data\.sources: .*shorter than one window.*got 5 tokens in 1 documents"
        r".*9 tokens or more",
    ):
        prepare_data(build_recipe(tmp_path, write_text(tmp_path / "a.txt", "hello"), length=8))
    training = write_text(tmp_path / "b.txt", "hello" * 9)
    with pytest.raises(DataError, match=r"data\.validation: .*shorter than one window.*1 tokens"):
        prepare_data(
            build_recipe(tmp_path, training, validation=write_text(tmp_path / "c.txt", "h"))
        )


def test_nothing_supervised_is_an_error(tmp_path: Path) -> None:
    # One token each, and no end of text to predict.
    path = write_json_lines(tmp_path / "a.jsonl", ["a", "b", "c"])
    with pytest.raises(DataError, match="no token of the train documents is supervised"):
        prepare_data(build_recipe(tmp_path, path, packing="documents"))


def test_broken_records_are_reported_from_the_cache_too(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    lines = [json.dumps({"text": text}) for text in STORIES]
    lines[4] = "not json"
    path = write_text(tmp_path / "a.jsonl", "\n".join(lines))

    def build(limit: float) -> Recipe:
        return build_recipe(tmp_path, path, max_broken_fraction=limit)

    with pytest.raises(DataError, match=r"a\.jsonl:5 not JSON"):
        prepare_data(build(0.0))
    for _ in range(2):
        caplog.clear()
        report = prepare_data(build(0.01)).report
        assert (report.records.num_records, report.records.num_broken) == (120, 1)
        assert [(item.file, item.line) for item in report.records.broken] == [("a.jsonl", 5)]
        assert "skipped 1 of 120 records" in caplog.text
    with pytest.raises(DataError, match=r"a\.jsonl:5 not JSON"):
        prepare_data(build(0.0))


@pytest.mark.parametrize(
    ("tokenizer", "problem"),
    [
        ("huggingface", "no tokenizer is set"),
        ({"kind": "huggingface", "path": "absent"}, "no such folder"),
    ],
)
def test_a_missing_tokenizer_is_an_error(tmp_path: Path, tokenizer: Any, problem: str) -> None:
    with pytest.raises(TokenizerError, match=problem):
        prepare_data(build_recipe(tmp_path, write_stories(tmp_path), tokenizer=tokenizer))


def test_damaged_token_files_are_detected(tmp_path: Path) -> None:
    recipe = build_recipe(tmp_path, write_stories(tmp_path))
    prepare_data(recipe)
    (tokens,) = (tmp_path / "cache" / "tokens").glob("*/train.tokens")
    tokens.write_bytes(tokens.read_bytes()[:-2])
    with pytest.raises(DataError, match=r"damaged.*Delete"):
        prepare_data(recipe)


def test_progress_is_reported_only_while_work_is_done(tmp_path: Path) -> None:
    reports: list[tuple[str, int, int]] = []
    recipe = build_recipe(
        tmp_path,
        write_stories(tmp_path),
        tokenizer={"kind": "bpe", "vocab_size": 300},
        validation_fraction=0.2,
    )
    prepare_data(recipe, progress=lambda *state: reports.append(state))
    stages = list(dict.fromkeys(stage for stage, _, _ in reports))
    assert stages == [
        "reading",
        "training the tokenizer",
        "tokenising train",
        "tokenising validation",
    ]
    assert all(0 <= process <= total for _, process, total in reports)
    reports.clear()
    prepare_data(recipe, progress=lambda *state: reports.append(state))
    assert reports == []


def test_the_trained_tokenizer_is_in_the_cache(tmp_path: Path) -> None:
    prepared = prepare_data(
        build_recipe(
            tmp_path, write_stories(tmp_path), tokenizer={"kind": "bpe", "vocab_size": 300}
        )
    )
    (folder,) = (tmp_path / "cache" / "tokens").glob("*/tokenizer")
    assert load_tokenizer(folder).content_hash == prepared.tokenizer.content_hash


def test_two_ways_to_validate_contradict_each_other(tmp_path: Path) -> None:
    path = write_stories(tmp_path)
    with pytest.raises(RecipeError, match="exclude each other"):
        build_recipe(tmp_path, path, validation=path, validation_fraction=0.1)


def test_preparing_data_needs_no_torch(tmp_path: Path) -> None:
    """`shardwright data` and the checks before a run must be fast; only the loader uses torch."""
    path = write_text(tmp_path / "a.txt", "hello " * 20)
    script = (
        "import sys; from pathlib import Path\n"
        "from tests.unit.data.recipes import build_recipe\n"
        "from shardwright.data.preparation import prepare_data\n"
        f"prepare_data(build_recipe(Path({str(tmp_path)!r}), {path!r}))\n"
        "assert not {'torch', 'transformers'} & set(sys.modules)\n"
    )
    process = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, cwd=ROOT, check=False
    )
    assert process.returncode == 0, process.stderr


def test_a_failed_write_is_reported_and_leaves_no_partial_files(tmp_path: Path) -> None:
    path = write_text(tmp_path / "a.txt", "hello " * 20_000)
    script = (
        "import resource; from pathlib import Path\n"
        "from shardwright.errors import DataError\n"
        "from tests.unit.data.recipes import build_recipe\n"
        "from shardwright.data.preparation import prepare_data\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))\n"
        "try:\n"
        f"    prepare_data(build_recipe(Path({str(tmp_path)!r}), {path!r}))\n"
        "except DataError as error:\n"
        "    print(error)\n"
    )
    process = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, cwd=ROOT, check=False
    )
    assert process.stdout.startswith(
        "data.cache_dir: the cache of tokenised data cannot be written: File too large"
    ), process
    assert list((tmp_path / "cache" / "tokens").iterdir()) == []
