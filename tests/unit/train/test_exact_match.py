"""Questions with known answers: read whole or not at all, asked as they were trained, compared as numbers are written."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from shardwright.architecture import read_config
from shardwright.cli.main import run as shardwright
from shardwright.data.chat import load_chat_template
from shardwright.data.loader import collate
from shardwright.data.prepare import prepare
from shardwright.data.supervision import Encoder
from shardwright.data.tokenize import load_tokenizer
from shardwright.data.tokenizer import Tokenizer
from shardwright.errors import DataError, ExitCode
from shardwright.model.decoder import Decoder
from shardwright.train.exact_match import ANSWER, answer_questions, find_answer, normalise, read_questions
from tests.unit.data.chat_tokenizers import CHATML, chat_folder, write_records
from tests.unit.data.recipes import recipe_of
from tests.unit.train.finished import make_run

PAIRS = [{"question": f"{a} + {b}?", "answer": f"the sum of {a} and {b}\n#### {a + b}"} for a, b in [(1, 2), (40, 2), (5, 900)]]
CONFIG: dict[str, Any] = {
    "model_type": "llama", "vocab_size": 400, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": 64,
}  # fmt: skip


def encoder_of(folder: Path, template: str | None) -> tuple[Tokenizer, Encoder]:
    path = chat_folder(folder, template)
    tokenizer = load_tokenizer(path)
    return tokenizer, Encoder(tokenizer, load_chat_template(path, None, {}, None), "assistant")


@pytest.mark.parametrize(
    ("text", "answer"),
    [("6 x 7 = 42\n#### 42", "42"), ("#### 1\nno, #### 1,200. ", "1,200."), ("42", None), ("####", None)],
)
def test_the_answer_is_the_last_of_its_form(text: str, answer: str | None) -> None:
    assert find_answer(text, ANSWER) == answer


def test_answers_are_compared_as_numbers_are_written() -> None:
    assert normalise("$1,200.") == normalise(" 1200") != normalise("12.00")
    assert find_answer("Answer: Paris", r"Answer: \w+") == "Answer: Paris"


@pytest.mark.parametrize("template", [CHATML, None], ids=["template", "plain"])
def test_a_model_that_has_learnt_its_answers_gives_them(tmp_path: Path, template: str | None) -> None:
    tokenizer, encoder = encoder_of(tmp_path / "tokenizer", template)
    path = write_records(tmp_path / "a.jsonl", *PAIRS)
    tokenizer_section = {"kind": "huggingface", "path": str(tmp_path / "tokenizer")}
    dataset = prepare(recipe_of(tmp_path, path, tokenizer=tokenizer_section, length=60, packing="none")).train
    batch = collate([dataset.sample(index) for index in range(len(dataset))], range(len(dataset)))
    torch.manual_seed(0)
    decoder = Decoder(read_config(CONFIG))
    with torch.no_grad():
        for parameter in decoder.parameters():
            parameter.normal_(0.0, 0.2) if parameter.ndim > 1 else parameter.fill_(1.0)
    questions = read_questions(Path(path), encoder)
    assert [question.expected for question in questions] == ["3", "42", "905"]
    stop = frozenset({tokenizer.eos_id}) - {None}
    before = list(answer_questions(decoder, tokenizer, questions, stop_ids=stop, max_new_tokens=40))  # type: ignore[arg-type]
    assert not any(item.correct for item in before)
    optimizer = torch.optim.AdamW(decoder.parameters(), lr=1e-2)
    for _ in range(80):
        optimizer.zero_grad()
        loss = decoder(
            batch.input_ids_BT, positions_BT=batch.positions_BT, document_ids_BT=batch.document_ids_BT, labels_BT=batch.labels_BT
        )
        (loss / batch.num_supervised).backward()
        optimizer.step()
    after = list(answer_questions(decoder, tokenizer, questions, stop_ids=stop, max_new_tokens=40))  # type: ignore[arg-type]
    assert [(item.answer, item.correct, item.stopped) for item in after] == [(answer, True, "eos") for answer in ("3", "42", "905")]
    assert [item.text for item in after] == [pair["answer"] for pair in PAIRS]


@pytest.mark.parametrize(
    ("record", "words"),
    [
        ({"question": "x", "answer": "no mark"}, r"a\.jsonl:4.*no answer that matches the pattern"),
        ({"question": "x", "answer": ""}, r"a\.jsonl:4.*'answer' is empty"),
        ("{", r"a\.jsonl:4.*not JSON"),
    ],
)
def test_a_record_that_cannot_be_asked_is_an_error(tmp_path: Path, record: object, words: str) -> None:
    _, encoder = encoder_of(tmp_path / "tokenizer", None)
    with pytest.raises(DataError, match=words):
        read_questions(Path(write_records(tmp_path / "a.jsonl", *PAIRS, record)), encoder)
    assert len(read_questions(tmp_path / "a.jsonl", encoder, limit=2)) == 2


def test_the_verb_scores_a_run_and_keeps_the_texts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The model of the made run knows ten letters and no end; its first answers are wrong, and said to be."""
    folder = make_run(tmp_path / "run")
    path = write_records(tmp_path / "a.jsonl", {"prompt": "abc", "completion": "= d"}, {"prompt": "fad", "completion": "= e"})
    words = ["evaluate", str(folder.path), "--questions", path, "--answer-pattern", "= (.)", "--max-new-tokens", "5", "--json"]
    assert shardwright(words) == ExitCode.DONE
    told = json.loads(capsys.readouterr().out)
    assert (told["num_questions"], told["num_correct"], told["exact_match"], told["step"]) == (2, 0, 0.0, 3)
    assert (told["num_without_answer"], told["num_not_ended"]) == (2, 2)
    lines = [json.loads(line) for line in Path(told["texts"]).read_text().splitlines()]
    assert [(line["expected"], line["line"], len(line["text"])) for line in lines] == [("d", 1, 5), ("e", 2, 5)]
    assert shardwright([*words[:4], "--answer-pattern", "("]) == ExitCode.WRONG_INPUT
    assert "not a regular expression" in capsys.readouterr().err
