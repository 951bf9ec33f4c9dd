"""Tasks with known answers: reading, prompting as in training, comparison of numbers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from shardwright.architecture import read_config
from shardwright.cli.main import run as shardwright
from shardwright.data.loader import collate
from shardwright.data.preparation import prepare_data
from shardwright.data.records.chat_template import load_chat_template
from shardwright.data.records.supervision import RecordEncoder
from shardwright.data.tokens.tokenizer import Tokenizer
from shardwright.data.tokens.tokenizer_loading import load_tokenizer
from shardwright.errors import DataError, ExitCode
from shardwright.inference.exact_match import (
    DEFAULT_PATTERN,
    extract_match,
    normalise_match,
    read_tasks,
    run_tasks,
)
from shardwright.model.decoder import Decoder
from tests.unit.data.chat_tokenizers import CHATML, chat_folder, write_records
from tests.unit.data.recipes import build_recipe
from tests.unit.training.finished import make_run

PAIRS = [
    {"question": f"{a} + {b}?", "answer": f"the sum of {a} and {b}\n#### {a + b}"}
    for a, b in [(1, 2), (40, 2), (5, 900)]
]
CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 400,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}


def build_encoder(folder: Path, template: str | None) -> tuple[Tokenizer, RecordEncoder]:
    path = chat_folder(folder, template)
    tokenizer = load_tokenizer(path)
    return tokenizer, RecordEncoder(
        tokenizer, load_chat_template(path, None, {}, None), "assistant"
    )


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("6 x 7 = 42\n#### 42", "42"),
        ("#### 1\nno, #### 1,200. ", "1,200."),
        ("42", None),
        ("####", None),
    ],
)
def test_the_last_match_is_the_answer(text: str, answer: str | None) -> None:
    assert extract_match(text, DEFAULT_PATTERN) == answer


def test_answers_are_normalised_before_comparison() -> None:
    assert normalise_match("$1,200.") == normalise_match(" 1200") != normalise_match("12.00")
    assert extract_match("Answer: Paris", r"Answer: \w+") == "Answer: Paris"


@pytest.mark.parametrize("template", [CHATML, None], ids=["template", "plain"])
def test_a_model_trained_on_the_answers_generates_them(
    tmp_path: Path, template: str | None
) -> None:
    tokenizer, encoder = build_encoder(tmp_path / "tokenizer", template)
    path = write_records(tmp_path / "a.jsonl", *PAIRS)
    tokenizer_section = {"kind": "huggingface", "path": str(tmp_path / "tokenizer")}
    dataset = prepare_data(
        build_recipe(tmp_path, path, tokenizer=tokenizer_section, length=60, packing="none")
    ).train
    batch = collate(
        [dataset.get_sample(index) for index in range(len(dataset))], range(len(dataset))
    )
    torch.manual_seed(0)
    decoder = Decoder(read_config(CONFIG))
    with torch.no_grad():
        for parameter in decoder.parameters():
            parameter.normal_(0.0, 0.2) if parameter.ndim > 1 else parameter.fill_(1.0)
    questions = read_tasks(Path(path), encoder)
    assert [question.expected_text for question in questions] == ["3", "42", "905"]
    stop_ids = frozenset({tokenizer.eos_id}) - {None}
    before = list(
        run_tasks(  # type: ignore[arg-type]
            decoder, tokenizer, questions, stop_ids=stop_ids, max_new_tokens=40
        )
    )
    assert not any(item.is_correct for item in before)
    optimizer = torch.optim.AdamW(decoder.parameters(), lr=1e-2)
    for _ in range(80):
        optimizer.zero_grad()
        loss = decoder(
            batch.input_ids_BT,
            positions_BT=batch.positions_BT,
            document_ids_BT=batch.document_ids_BT,
            labels_BT=batch.labels_BT,
        )
        (loss / batch.num_supervised).backward()
        optimizer.step()
    after = list(
        run_tasks(  # type: ignore[arg-type]
            decoder, tokenizer, questions, stop_ids=stop_ids, max_new_tokens=40
        )
    )
    assert [(item.extracted_text, item.is_correct, item.stop_reason) for item in after] == [
        (answer, True, "eos") for answer in ("3", "42", "905")
    ]
    assert [item.completion_text for item in after] == [pair["answer"] for pair in PAIRS]


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"question": "x", "answer": "no mark"}, r"a\.jsonl:4.*no answer that matches the pattern"),
        ({"question": "x", "answer": ""}, r"a\.jsonl:4.*'answer' is empty"),
        ("{", r"a\.jsonl:4.*not JSON"),
    ],
)
def test_an_unusable_record_is_an_error(tmp_path: Path, record: object, message: str) -> None:
    _, encoder = build_encoder(tmp_path / "tokenizer", None)
    with pytest.raises(DataError, match=message):
        read_tasks(Path(write_records(tmp_path / "a.jsonl", *PAIRS, record)), encoder)
    assert len(read_tasks(tmp_path / "a.jsonl", encoder, limit=2)) == 2


def test_the_verb_scores_a_run_and_writes_the_texts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The model of the run has ten letters and no end of text; its answers are scored as wrong."""
    folder = make_run(tmp_path / "run")
    path = write_records(
        tmp_path / "a.jsonl",
        {"prompt": "abc", "completion": "= d"},
        {"prompt": "fad", "completion": "= e"},
    )
    arguments = [
        "evaluate",
        str(folder.path),
        "--questions",
        path,
        "--answer-pattern",
        "= (.)",
        "--max-new-tokens",
        "5",
        "--json",
    ]
    assert shardwright(arguments) == ExitCode.DONE
    output = json.loads(capsys.readouterr().out)
    assert (
        output["num_questions"],
        output["num_correct"],
        output["exact_match"],
        output["step"],
    ) == (
        2,
        0,
        0.0,
        3,
    )
    assert (output["num_without_answer"], output["num_not_ended"]) == (2, 2)
    lines = [json.loads(line) for line in Path(output["texts"]).read_text().splitlines()]
    assert [(line["expected"], line["line"], len(line["text"])) for line in lines] == [
        ("d", 1, 5),
        ("e", 2, 5),
    ]
    assert shardwright([*arguments[:4], "--answer-pattern", "("]) == ExitCode.WRONG_INPUT
    assert "not a regular expression" in capsys.readouterr().err


def test_outputs_and_prompts_are_checked_before_any_answer(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "shardwright.inference.model_source.load_decoder", lambda *_, **__: pytest.fail("loaded")
    )
    folder = make_run(tmp_path / "run")
    short = {"prompt": "abc", "completion": "= d"}
    path = write_records(tmp_path / "a.jsonl", short)
    content = Path(path).read_text()
    words = ["evaluate", str(folder.path), "--answer-pattern", "= (.)", "--questions"]
    assert shardwright([*words, path, "--out", path]) == ExitCode.WRONG_INPUT
    assert "--out: --questions reads this file, which would be replaced" in capsys.readouterr().err
    assert Path(path).read_text() == content
    out = tmp_path / "a.jsonl" / "out.jsonl"
    assert shardwright([*words, path, "--out", str(out)]) == ExitCode.WRONG_INPUT
    assert "--out: cannot be written" in capsys.readouterr().err
    long = write_records(tmp_path / "b.jsonl", short, {"prompt": "abc" * 99, "completion": "= d"})
    assert shardwright([*words, long]) == ExitCode.WRONG_INPUT
    assert (
        "b.jsonl:2: the prompt is longer than the model's maximum length (got"
        in capsys.readouterr().err
    )
