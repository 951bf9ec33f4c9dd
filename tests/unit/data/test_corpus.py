"""Split of documents: no validation document is in the training data."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shardwright.config.data import DataSection
from shardwright.data.corpus import Corpus, Side, scan_records, split_corpus
from shardwright.data.sources.file_listing import list_files
from shardwright.errors import DataError
from tests.unit.data.recipes import story, write_json_lines, write_text


def build_corpus(sources: Any, **data: Any) -> Corpus:
    section = DataSection(sources=sources, **data)
    training = scan_records(list_files(section.sources, "data.sources"), lambda done: None)
    validation = (
        scan_records(list_files(section.validation, "data.validation"), lambda done: None)
        if section.validation
        else None
    )
    return split_corpus(training, validation, section)


def list_texts(corpus: Corpus, side: Side) -> list[str]:
    text_by_record: dict[int, str] = {}
    for piece in corpus.iterate_pieces(side):
        text_by_record[piece.record] = text_by_record.get(piece.record, "") + piece.text
    return list(text_by_record.values())


def test_each_document_and_its_duplicates_are_on_one_side(tmp_path: Path) -> None:
    stories = [story(number % 150) for number in range(300)]
    corpus = build_corpus(write_json_lines(tmp_path / "a.jsonl", stories), validation_fraction=0.2)
    train = list_texts(corpus, "train")
    validation = list_texts(corpus, "validation")
    assert sorted(train + validation) == sorted(stories)
    assert not set(train) & set(validation)
    assert 0.1 < len(validation) / 300 < 0.3
    assert train == [text for text in stories if text in set(train)]  # in the order of the source


def test_documents_keep_their_side_as_a_corpus_grows(tmp_path: Path) -> None:
    small = build_corpus(
        write_json_lines(tmp_path / "a.jsonl", [story(n) for n in range(100)]),
        validation_fraction=0.2,
    )
    large = build_corpus(
        write_json_lines(tmp_path / "b.jsonl", [story(n) for n in range(200)]),
        validation_fraction=0.2,
    )
    assert set(list_texts(small, "validation")) <= set(list_texts(large, "validation"))
    assert set(list_texts(small, "train")) <= set(list_texts(large, "train"))


@pytest.mark.parametrize("fraction", [1e-6, 0.999999])
def test_neither_side_is_empty_with_two_documents(tmp_path: Path, fraction: float) -> None:
    corpus = build_corpus(
        write_json_lines(tmp_path / "a.jsonl", ["one", "two", "one"]), validation_fraction=fraction
    )
    assert set(list_texts(corpus, "train")) | set(list_texts(corpus, "validation")) == {
        "one",
        "two",
    }
    assert len(set(list_texts(corpus, "train"))) == len(set(list_texts(corpus, "validation"))) == 1


@pytest.mark.parametrize(
    ("stories", "got"),
    [
        (["one"], "(got 1 document, 1 different)"),
        (["one", "one"], "(got 2 documents, 1 different)"),
    ],
)
def test_one_document_cannot_be_split_by_documents(
    tmp_path: Path, stories: list[str], got: str
) -> None:
    with pytest.raises(DataError, match=rf"{re.escape(got)}.*tail"):
        build_corpus(write_json_lines(tmp_path / "a.jsonl", stories), validation_fraction=0.1)


def test_tail_splits_by_characters_as_nanogpt_does(tmp_path: Path) -> None:
    text = "".join(chr(ord("a") + number % 26) for number in range(9_999))
    corpus = build_corpus(
        write_text(tmp_path / "a.txt", text), validation_fraction=0.1, validation_split="tail"
    )
    (train,) = list_texts(corpus, "train")
    (validation,) = list_texts(corpus, "validation")
    assert train == text[: int(9_999 * 0.9)]
    assert train + validation == text
    assert (corpus.count_characters("train"), corpus.count_characters("validation")) == (
        len(train),
        len(validation),
    )


@given(
    lengths=st.lists(st.integers(1, 30), min_size=1, max_size=12),
    fraction=st.floats(0.05, 0.95),
)
@settings(
    max_examples=60,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
def test_tail_gives_each_character_to_one_side(
    tmp_path: Path, lengths: list[int], fraction: float
) -> None:
    stories = [chr(ord("a") + number) * length for number, length in enumerate(lengths)]
    whole = "".join(stories)
    boundary = int(len(whole) * (1.0 - fraction))
    path = write_json_lines(tmp_path / "a.jsonl", stories)
    if not 0 < boundary < len(whole):
        with pytest.raises(DataError, match="one side empty"):
            build_corpus(path, validation_fraction=fraction, validation_split="tail")
        return
    corpus = build_corpus(path, validation_fraction=fraction, validation_split="tail")
    assert "".join(list_texts(corpus, "train")) == whole[:boundary]
    assert "".join(list_texts(corpus, "validation")) == whole[boundary:]
    assert corpus.count_characters("train") == boundary
    assert corpus.count_characters("validation") == len(whole) - boundary


def test_the_halves_of_a_split_document_have_no_false_ends(tmp_path: Path) -> None:
    corpus = build_corpus(
        write_text(tmp_path / "a.txt", "x" * 100), validation_fraction=0.5, validation_split="tail"
    )
    (head,) = corpus.iterate_pieces("train")
    (tail,) = corpus.iterate_pieces("validation")
    assert (head.is_document_start, head.is_document_end) == (True, False)
    assert (tail.is_document_start, tail.is_document_end) == (False, True)


def test_tail_drops_documents_that_are_also_in_training(tmp_path: Path) -> None:
    stories = ["aaaa", "bbbb", "cccc", "dddd", "aaaa", "eeee", "cccc", "ffff"]
    path = write_json_lines(tmp_path / "a.jsonl", stories)
    corpus = build_corpus(path, validation_fraction=0.5, validation_split="tail")
    assert list_texts(corpus, "train") == stories[:4]
    assert list_texts(corpus, "validation") == ["eeee", "ffff"]
    assert corpus.num_duplicates_dropped == 2
    # The boundary is inside the third document. Half of its copy is in training: drop the copy.
    split_original = build_corpus(path, validation_fraction=22 / 32, validation_split="tail")
    assert list_texts(split_original, "train") == ["aaaa", "bbbb", "cc"]
    assert list_texts(split_original, "validation") == ["cc", "dddd", "eeee", "ffff"]
    # The boundary is inside a copy of a training document: no part of the copy is in validation.
    split_copy = build_corpus(path, validation_fraction=14 / 32, validation_split="tail")
    assert list_texts(split_copy, "train") == ["aaaa", "bbbb", "cccc", "dddd", "aa"]
    assert list_texts(split_copy, "validation") == ["eeee", "ffff"]


def test_a_tail_of_copies_is_an_error(tmp_path: Path) -> None:
    path = write_json_lines(tmp_path / "a.jsonl", ["one", "two", "one", "two"])
    with pytest.raises(DataError, match=r"also in the training data.*documents"):
        build_corpus(path, validation_fraction=0.5, validation_split="tail")


def test_explicit_validation_drops_documents_that_are_also_in_training(tmp_path: Path) -> None:
    training = write_json_lines(tmp_path / "a.jsonl", ["one", "two", "three"])
    validation = write_json_lines(tmp_path / "b.jsonl", ["four", "two", "five", "two"])
    corpus = build_corpus(training, validation=validation)
    assert list_texts(corpus, "train") == ["one", "two", "three"]
    assert list_texts(corpus, "validation") == ["four", "five"]
    assert corpus.num_duplicates_dropped == 2
    assert (corpus.count_characters("train"), corpus.count_characters("validation")) == (11, 8)
    with pytest.raises(DataError, match="the training sources contain all text of the validation"):
        build_corpus(training, validation=training)


def test_without_validation_every_document_is_in_training(tmp_path: Path) -> None:
    corpus = build_corpus(write_json_lines(tmp_path / "a.jsonl", ["one", "two"]))
    assert list_texts(corpus, "train") == ["one", "two"]
    assert corpus.count_characters("validation") == 0


def test_broken_records_are_skipped_and_counted(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "one"}\nnot json\n{"text": "two"}\n')
    (tmp_path / "b.txt").write_bytes(b"begins well\n" * 40_000 + b"\xff")
    write_text(tmp_path / "c.txt", "three")
    write_text(tmp_path / "d.txt", "")
    corpus = build_corpus(str(tmp_path))
    assert list_texts(corpus, "train") == ["one", "two", "three"]
    records = corpus.training.statistics
    assert (records.num_records, records.num_broken, records.num_empty_files) == (5, 2, 1)
    assert [(item.file, item.line) for item in records.broken] == [
        ("a.jsonl", 2),
        ("b.txt", 40_001),
    ]
    records.check(0.4, "data.sources")
    with pytest.raises(
        DataError, match=r"a\.jsonl:2 not JSON.*b\.txt:40001.*2 of 5 broken, 40\.0%.*39\.0%"
    ) as caught:
        records.check(0.39, "data.sources")
    assert caught.value.remedy is not None


def test_the_message_for_a_thousand_broken_records_is_short(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text("nonsense\n" * 1000)
    records = scan_records(
        list_files([DataSection(sources=str(tmp_path)).sources[0]], "data.sources"),
        lambda done: None,
    ).statistics
    assert records.num_broken == 1000
    with pytest.raises(DataError, match="and 996 more") as caught:
        records.check(0.5, "data.sources")
    assert len(str(caught.value)) < 600


def test_sources_without_text_are_refused(tmp_path: Path) -> None:
    write_text(tmp_path / "a.txt", "")
    with pytest.raises(DataError, match=r"contain no text.*files: 1, empty files: 1"):
        build_corpus(str(tmp_path))


def test_sources_that_change_while_being_read_are_detected(tmp_path: Path) -> None:
    path = write_json_lines(tmp_path / "a.jsonl", ["one", "two"])
    corpus = build_corpus(path)
    write_json_lines(tmp_path / "a.jsonl", ["one", "two", "three"])
    with pytest.raises(DataError, match="changed while"):
        list_texts(corpus, "train")
