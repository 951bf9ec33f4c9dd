"""Several processes encode records to the same results as one, in order."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from shardwright.data.records.chat_template import load_chat_template
from shardwright.data.records.supervision import RecordEncoder
from shardwright.data.sources.source_reader import TextPiece
from shardwright.data.tokens import encoding_workers
from shardwright.data.tokens.encoding_workers import encode_in_order
from shardwright.data.tokens.tokenizer_loading import load_tokenizer
from shardwright.errors import TokenizerError
from tests.unit.data.chat_tokenizers import CHATML, NO_END, THROWS, chat_folder, turns


def build_encoder(folder: Path, template: str) -> RecordEncoder:
    path = chat_folder(folder, template)
    return RecordEncoder(
        load_tokenizer(path), load_chat_template(path, None, {}, None), "assistant"
    )


def iterate_pieces(count: int, drawn: list[int] | None = None) -> Iterator[TextPiece]:
    for number in range(count):
        if drawn is not None:
            drawn.append(number)
        question = "a bomb" if number % 50 == 7 else f"question {number}"
        content = json.dumps({"messages": turns(question, f"answer {number}")})
        yield TextPiece(content, number, True, True, "chat", "a.jsonl", number + 1)


def test_processes_give_the_results_of_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encoding_workers, "RECORDS_BEFORE_WORKERS", 30)
    monkeypatch.setattr(encoding_workers, "RECORDS_PER_BATCH", 7)
    encoder = build_encoder(tmp_path, THROWS)
    from_one_process = list(encode_in_order(encoder, iterate_pieces(300), 1))
    drawn: list[int] = []
    from_two_processes = encode_in_order(encoder, iterate_pieces(300, drawn), 2)
    results = []
    for number, outcome in enumerate(from_two_processes):
        results.append(outcome)
        assert len(drawn) <= number + 30 + 7 * 10, "the file is read no further than needed"
    assert [piece.record for piece, _ in results] == list(range(300))
    assert sum(isinstance(outcome, str) for _, outcome in results) == 6
    for (_, one), (_, other) in zip(from_one_process, results, strict=True):
        if isinstance(one, str) or isinstance(other, str):
            assert one == other
        else:
            assert one.ids.tolist() == other.ids.tolist()
            assert one.supervised_mask.tolist() == other.supervised_mask.tolist()


def test_an_error_of_the_template_is_raised_unchanged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(encoding_workers, "RECORDS_BEFORE_WORKERS", 0)
    with pytest.raises(TokenizerError, match=r"data\.chat_template: no end-of-turn token"):
        list(encode_in_order(build_encoder(tmp_path, NO_END), iterate_pieces(20), 2))


def test_few_records_start_no_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encoding_workers, "ProcessPoolExecutor", None)
    assert (
        len(list(encode_in_order(build_encoder(tmp_path, CHATML), iterate_pieces(100), 8))) == 100
    )
