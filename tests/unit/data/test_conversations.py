"""Conversations from files to samples: split, cache, packing and statistics."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import yaml

from shardwright.cli.data import data_command
from shardwright.config import Recipe
from shardwright.config.data import IGNORED_LABEL
from shardwright.data.dataset import TokenDataset
from shardwright.data.loader import collate, read_step_micro_batches
from shardwright.data.packed_dataset import PackedDataset
from shardwright.data.preparation import prepare_data
from shardwright.data.prepared_data import PreparedData
from shardwright.data.records.chat_template import load_chat_template
from shardwright.data.sample_order import SampleOrder
from shardwright.errors import DataError, TokenizerError
from shardwright.plans import BatchPlan
from tests.unit.data.chat_tokenizers import (
    CHATML,
    NO_END,
    THROWS,
    chat_folder,
    turns,
    write_records,
)
from tests.unit.data.recipes import build_recipe, write_json_lines

CHATS = [
    {"messages": turns(f"question {number}", f"answer {number}" * (1 + number % 5))}
    for number in range(40)
]


def chat_recipe(
    folder: Path, sources: Any, *, template: str | None = CHATML, length: int = 64, **data: Any
) -> Recipe:
    tokenizer = chat_folder(folder / "tokenizer", template)
    return build_recipe(
        folder,
        sources,
        tokenizer={"kind": "huggingface", "path": str(tokenizer)},
        length=length,
        **data,
    )


def list_supervised_texts(prepared: PreparedData, dataset: TokenDataset | None = None) -> list[str]:
    """List the supervised spans of all samples as text, sorted."""
    dataset = dataset or prepared.train
    texts = []
    for index in range(len(dataset)):
        sample = dataset.get_sample(index)
        documents = (
            np.zeros_like(sample.labels) if sample.document_ids is None else sample.document_ids
        )
        for number in range(int(documents.max()) + 1):
            is_supervised = (documents == number) & (sample.labels != IGNORED_LABEL)
            if is_supervised.any():
                texts.append(prepared.tokenizer.decode(sample.labels[is_supervised].tolist()))
    return sorted(texts)


def list_answers(records: list[dict[str, Any]]) -> list[str]:
    return sorted(record["messages"][-1]["content"] + "<|im_end|>" for record in records)


def test_conversations_are_packed_into_rows(tmp_path: Path) -> None:
    prepared = prepare_data(chat_recipe(tmp_path, write_records(tmp_path / "a.jsonl", *CHATS)))
    assert isinstance(prepared.train, PackedDataset)
    assert list_supervised_texts(prepared) == list_answers(CHATS)
    report = prepared.report
    assert (report.packing, report.supervise, report.template) == (
        "documents",
        "assistant",
        "the tokenizer's own",
    )
    assert (report.sources[0].records, report.sources[0].columns) == (
        "messages",
        (("messages", "messages"),),
    )
    assert report.train.num_supervised == sum(
        int((prepared.train.get_sample(index).labels != IGNORED_LABEL).sum())
        for index in range(len(prepared.train))
    )


def test_tools_and_calls_keep_the_order_of_the_file(tmp_path: Path) -> None:
    """As transformers renders them at inference. Sorted keys would put arguments before names."""
    parameters = {"type": "object", "properties": {"to": {"type": "string"}, "by": {"x": 1}}}
    tool = {"type": "function", "function": {"name": "go", "parameters": parameters}}
    function = {"name": "go", "arguments": {"to": "Oslo", "by": {"z": 1, "a": 2}}}
    dialogue = turns("go", "went")
    messages = [
        dialogue[0],
        {"role": "assistant", "content": "", "tool_calls": [{"function": function}]},
        {"content": "done", "role": "tool"},
        dialogue[1],
    ]
    path = write_records(tmp_path / "a.jsonl", {"tools": [tool], "messages": messages})
    prepared = prepare_data(chat_recipe(tmp_path, path, length=512, validation_fraction=0))
    sample = prepared.train.get_sample(0)
    template = load_chat_template(tmp_path / "tokenizer", None, {}, None)
    assert template is not None
    text = prepared.tokenizer.decode(np.asarray(sample.input_ids).tolist())
    assert text.startswith(template.render(messages, [tool]).rstrip())
    assert json.dumps(function) in text


@pytest.mark.parametrize("form", ["json", "parquet", "datasets"])
def test_every_file_format_gives_the_same_samples(tmp_path: Path, form: str) -> None:
    expected = prepare_data(
        chat_recipe(tmp_path / "jsonl", write_records(tmp_path / "a.jsonl", *CHATS))
    )
    table = pyarrow.Table.from_pylist(CHATS)
    if form == "json":
        path = tmp_path / "a.json"
        path.write_text(json.dumps(CHATS, indent=2))
    elif form == "parquet":
        path = tmp_path / "a.parquet"
        pyarrow.parquet.write_table(table, path)
    else:
        path = tmp_path / "set"
        path.mkdir()
        (path / "state.json").write_text(
            json.dumps({"_data_files": [{"filename": "data-0.arrow"}]})
        )
        with (
            pyarrow.OSFile(str(path / "data-0.arrow"), "wb") as file,
            pyarrow.ipc.new_stream(file, table.schema) as writer,
        ):
            writer.write_table(table)
    actual = prepare_data(chat_recipe(tmp_path / form, str(path)))
    assert len(actual.train) == len(expected.train)
    for index in range(len(actual.train)):
        for one, other in zip(
            actual.train.get_sample(index), expected.train.get_sample(index), strict=True
        ):
            assert np.array_equal(np.asarray(one), np.asarray(other))


def test_a_second_run_encodes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = chat_recipe(
        tmp_path, write_records(tmp_path / "a.jsonl", *CHATS), validation_fraction=0.2
    )
    first = prepare_data(recipe)
    monkeypatch.setattr("shardwright.data.tokens.tokenisation.RecordEncoder", None)
    second = prepare_data(recipe)
    assert second.content_hash == first.content_hash
    assert second.report == first.report
    assert list_supervised_texts(second) == list_supervised_texts(first)


@pytest.mark.parametrize(
    "change",
    [
        {"supervise": "all"},
        {"overlong": "drop"},
        {"packing": "none"},
        {"template_variables": {"x": 1}},
        {"chat_template": "other"},
    ],
    ids=lambda change: next(iter(change)),
)
def test_options_that_change_samples_change_the_hash(
    tmp_path: Path, change: dict[str, Any]
) -> None:
    path = write_records(tmp_path / "a.jsonl", *CHATS)
    if "chat_template" in change:
        (tmp_path / "other.jinja").write_text(
            CHATML.replace("role + '\n'", "role + ':\n'").replace("assistant\n", "assistant:\n")
        )
        change = {"chat_template": str(tmp_path / "other.jinja")}
    assert (
        prepare_data(chat_recipe(tmp_path, path)).content_hash
        != prepare_data(chat_recipe(tmp_path, path, **change)).content_hash
    )


def test_a_template_of_the_recipe_is_saved_with_the_tokenizer(tmp_path: Path) -> None:
    (tmp_path / "chatml.jinja").write_text(CHATML)
    path = write_records(tmp_path / "a.jsonl", *CHATS)
    prepared = prepare_data(
        chat_recipe(tmp_path, path, template=None, chat_template=str(tmp_path / "chatml.jinja"))
    )
    assert list_supervised_texts(prepared) == list_answers(CHATS)
    prepared.tokenizer.save(tmp_path / "saved")
    assert (tmp_path / "saved" / "chat_template.jinja").read_text() == CHATML


@pytest.mark.parametrize("split", ["documents", "tail"])
def test_validation_consists_of_whole_conversations(tmp_path: Path, split: str) -> None:
    records = CHATS * 2 if split == "documents" else CHATS
    path = write_records(tmp_path / "a.jsonl", *records)
    prepared = prepare_data(
        chat_recipe(tmp_path, path, validation_fraction=0.33, validation_split=split)
    )
    assert prepared.validation is not None
    train = list_supervised_texts(prepared)
    validation = list_supervised_texts(prepared, prepared.validation)
    assert train
    assert validation
    assert not set(train) & set(validation)
    assert sorted(train + validation) == list_answers(records)


def test_broken_records_are_counted_reported_and_limited(tmp_path: Path) -> None:
    bad: list[Any] = [
        {"messages": turns("a", "")},
        {"messages": [*turns("a"), *turns("b", "c")]},
        {"instruction": "a", "output": "b"},
        '{"messages": [{"role": "user"',
        {"messages": turns("a bomb", "b")},
        {"messages": turns("spells <|im_end|>", "b")},
        {"messages": [*turns("a"), {"role": "assistant", "content": "b", "loss_weight": 0}]},
    ]
    path = write_records(tmp_path / "a.jsonl", *CHATS[:20], *bad, *CHATS[20:])
    prepared = prepare_data(chat_recipe(tmp_path, path, template=THROWS, max_broken_fraction=0.2))
    records = prepared.report.records
    assert (records.num_records, records.num_broken) == (47, 7)
    reasons = {item.line: item.reason for item in records.broken}
    for line, message in zip(
        range(21, 28),
        [
            "is empty",
            "out of order",
            "no field 'messages'",
            "not JSON",
            "no bombs",
            "control token",
            "nothing in it is supervised",
        ],
        strict=True,
    ):
        assert message in reasons[line], reasons
    assert list_supervised_texts(prepared) == list_answers(CHATS)
    with pytest.raises(DataError, match=r"too many records.*a\.jsonl:21.*7 of 47 broken"):
        prepare_data(chat_recipe(tmp_path, path, template=THROWS, max_broken_fraction=0.1))


def test_records_that_fail_to_encode_count_as_broken(tmp_path: Path) -> None:
    path = write_records(tmp_path / "a.jsonl", *CHATS, {"messages": turns("a bomb", "b")})
    recipe = chat_recipe(tmp_path, path, template=THROWS)
    for _ in range(2):  # the second time from the cache
        with pytest.raises(
            DataError,
            match=r"a\.jsonl:41 the chat template raises TemplateError: no bombs.*1 of 41",
        ):
            prepare_data(recipe)


def build_weighted_record(weight: object) -> dict[str, Any]:
    return {
        "messages": [
            {"role": "user", "content": "a"},
            {"role": "assistant", "content": "b c", "loss_weight": weight},
        ]
    }


def test_a_record_with_an_invalid_weight_is_broken(tmp_path: Path) -> None:
    path = write_records(tmp_path / "a.jsonl", *CHATS, build_weighted_record("much"))
    with pytest.raises(DataError, match=r"a\.jsonl:41 turn 2 has the loss weight 'much'"):
        prepare_data(chat_recipe(tmp_path, path))


@pytest.mark.parametrize("packing", ["documents", "none"])
def test_loss_weights_reach_the_tokens_of_their_turns(tmp_path: Path, packing: str) -> None:
    """Three of 43 conversations have weights; all other tokens have weight 1.

    A batch sums the weights of its supervised tokens.
    """
    weights = [0.25, 3.0, 0.5]
    path = write_records(tmp_path / "a.jsonl", *CHATS, *map(build_weighted_record, weights))
    for _ in range(2):  # the second time from the cache
        prepared = prepare_data(chat_recipe(tmp_path, path, packing=packing))
    dataset = prepared.train
    encode = prepared.tokenizer.encode
    assert all(
        sample.weights is not None for sample in map(dataset.get_sample, range(len(dataset)))
    )
    batch = collate(
        [dataset.get_sample(index) for index in range(len(dataset))], range(len(dataset))
    )
    assert batch.weights_BT is not None
    supervised_weights = batch.weights_BT[batch.labels_BT != -100]
    num_tokens = len(encode("b c")) + 1
    assert sorted(supervised_weights[supervised_weights != 1].tolist()) == sorted(
        num_tokens * weights
    )
    assert prepared.report.train.counts.num_weighted == num_tokens * 3
    assert batch.num_supervised == dataset.num_supervised
    assert batch.weight_sum == batch.num_supervised + num_tokens * sum(
        weight - 1 for weight in weights
    )
    assert batch.build_model_arguments()["weights_BT"] is batch.weights_BT


def test_an_enormous_record_is_reported_by_file_and_line(tmp_path: Path) -> None:
    path = write_records(tmp_path / "a.jsonl", *CHATS, {"messages": turns("a", "b" * 5000)})
    with pytest.raises(
        DataError,
        match=r"a\.jsonl:41 5,\d+ characters, but data\.max_record_characters allows 5,000"
        r".*1 of 41",
    ):
        prepare_data(chat_recipe(tmp_path, path, max_record_characters=5000))
    prepared = prepare_data(
        chat_recipe(tmp_path, path, max_record_characters=5000, max_broken_fraction=0.03)
    )
    assert list_supervised_texts(prepared) == list_answers(CHATS)
    assert (
        prepare_data(
            chat_recipe(tmp_path, path, max_record_characters=None)
        ).report.records.num_broken
        == 0
    )


def test_weights_of_zero_and_one_store_no_weights(tmp_path: Path) -> None:
    unsupervised_user = [
        {"role": "user", "content": "a", "loss_weight": 0.0},
        {"role": "assistant", "content": "b"},
    ]
    path = write_records(
        tmp_path / "a.jsonl", *CHATS, build_weighted_record(1), {"messages": unsupervised_user}
    )
    prepared = prepare_data(chat_recipe(tmp_path, path))
    assert prepared.train.get_sample(0).weights is None
    assert not list((tmp_path / "cache").rglob("*.weights"))


def test_a_template_without_end_token_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TokenizerError, match="no end-of-turn token"):
        prepare_data(
            chat_recipe(tmp_path, write_records(tmp_path / "a.jsonl", *CHATS), template=NO_END)
        )


def test_records_with_every_token_supervised_are_an_error(tmp_path: Path) -> None:
    path = write_records(
        tmp_path / "a.jsonl",
        *[{"prompt": "", "completion": f"text {number}"} for number in range(9)],
    )
    with pytest.raises(
        DataError, match=r"every token of the train records is supervised.*supervise: all"
    ):
        prepare_data(chat_recipe(tmp_path, path))
    assert prepare_data(chat_recipe(tmp_path, path, supervise="all")).train.num_supervised > 0


def test_windows_over_conversations_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="windows would cross the boundaries"):
        prepare_data(
            chat_recipe(tmp_path, write_records(tmp_path / "a.jsonl", *CHATS), packing="windows")
        )


def test_token_ids_beyond_the_tokenizer_are_refused(tmp_path: Path) -> None:
    valid = [
        {"input_ids": [1, 2, 3, number], "labels": [-100, -100, 3, number]} for number in range(9)
    ]
    prepared = prepare_data(chat_recipe(tmp_path, write_records(tmp_path / "a.jsonl", *valid)))
    assert prepared.train.num_supervised == 18
    assert prepared.report.sources[0].records == "tokens"
    with pytest.raises(TokenizerError, match=r"token id 70000"):
        prepare_data(
            chat_recipe(
                tmp_path, write_records(tmp_path / "b.jsonl", *valid, {"input_ids": [1, 70000]})
            )
        )
    with pytest.raises(TokenizerError, match=r"token id 9000"):
        prepare_data(
            chat_recipe(
                tmp_path, write_records(tmp_path / "c.jsonl", *valid, {"input_ids": [1, 9000]})
            ),
            400,
        )


@pytest.mark.parametrize("overlong", ["cut", "drop", "refuse"])
def test_overlong_conversations_are_split_dropped_or_refused(tmp_path: Path, overlong: str) -> None:
    long = [{"messages": turns("q " * 100, "short")}, {"messages": turns("q", "long " * 60)}]
    path = write_records(tmp_path / "a.jsonl", *CHATS, *long)
    recipe = chat_recipe(tmp_path, path, overlong=overlong)
    if overlong == "refuse":
        with pytest.raises(DataError, match=r"longer than a row.*2 of 42 documents"):
            prepare_data(recipe)
        return
    prepared = prepare_data(recipe)
    side = prepared.report.train
    if overlong == "drop":
        assert (side.num_cut, side.num_dropped) == (0, 2)
        assert list_supervised_texts(prepared) == list_answers(CHATS)
    else:
        assert (side.num_cut, side.num_dropped) == (2, 0)
        assert side.num_unsupervised_pieces >= 2  # the long question comes before its answer
        assert len("".join(list_supervised_texts(prepared))) == len(
            "".join(list_answers(CHATS + long))
        )


def test_unpacked_rows_contain_one_document_each(tmp_path: Path) -> None:
    prepared = prepare_data(
        chat_recipe(tmp_path, write_records(tmp_path / "a.jsonl", *CHATS), packing="none")
    )
    assert len(prepared.train) == len(CHATS)
    assert list_supervised_texts(prepared) == list_answers(CHATS)
    assert prepared.report.train.padding_fraction > 0.3


def test_text_and_conversations_are_mixed(tmp_path: Path) -> None:
    texts = write_json_lines(tmp_path / "b.jsonl", ["the end", "the weather"])
    prepared = prepare_data(
        chat_recipe(tmp_path, [write_records(tmp_path / "a.jsonl", *CHATS), texts])
    )
    # The first token of a text is not predicted; all others are, including the end of text.
    tails = [
        prepared.tokenizer.decode(prepared.tokenizer.encode(text)[1:]) + "<|im_end|>"
        for text in ("the end", "the weather")
    ]
    assert list_supervised_texts(prepared) == sorted(list_answers(CHATS) + tails)
    assert [source.records for source in prepared.report.sources] == ["messages", "text"]
    assert [source.num_documents for source in prepared.report.sources] == [40, 2]


def test_a_text_field_of_the_recipe_selects_text(tmp_path: Path) -> None:
    path = write_records(
        tmp_path / "a.jsonl",
        *[record | {"body": f"the text {number}"} for number, record in enumerate(CHATS)],
    )
    assert prepare_data(chat_recipe(tmp_path, path)).report.sources[0].records == "messages"
    assert (
        prepare_data(chat_recipe(tmp_path, {"path": path, "text_field": "body"}))
        .report.sources[0]
        .records
        == "text"
    )


def test_a_trained_tokenizer_uses_a_template_without_control_tokens(tmp_path: Path) -> None:
    """Turns end with the end-of-text token of the tokenizer that is trained on them."""
    (tmp_path / "plain.jinja").write_text(
        "{% for m in messages %}{{ m.role + ':\\n' + m.content "
        "+ (eos_token if m.role == 'assistant' else '\\n') }}{% endfor %}"
        "{% if add_generation_prompt %}{{ 'assistant:\\n' }}{% endif %}"
    )
    path = write_records(tmp_path / "a.jsonl", *CHATS)
    template = str(tmp_path / "plain.jinja")
    recipe = build_recipe(
        tmp_path,
        path,
        tokenizer={"kind": "bpe", "vocab_size": 300},
        length=64,
        chat_template=template,
    )
    prepared = prepare_data(recipe)
    assert list_supervised_texts(prepared) == sorted(
        record["messages"][-1]["content"] + "<|endoftext|>" for record in CHATS
    )
    prepared.tokenizer.save(tmp_path / "saved")
    assert load_chat_template(tmp_path / "saved", None, {}, None) is not None


def test_loss_weights_in_the_format_of_llama_factory(tmp_path: Path, outside_data: Path) -> None:
    """500 conversations whose contents are lists of parts and whose turns carry loss weights."""
    path = outside_data / "sft" / "v1_sft_demo.jsonl"
    prepared = prepare_data(chat_recipe(tmp_path, str(path), length=4096, validation_fraction=0.1))
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    expected = [row["messages"][1]["content"][0]["value"] + "<|im_end|>" for row in rows]
    assert {turn["loss_weight"] for row in rows for turn in row["messages"]} == {0.0, 1.0}
    assert sorted(
        list_supervised_texts(prepared) + list_supervised_texts(prepared, prepared.validation)
    ) == sorted(expected)
    assert prepared.report.records.num_broken == 0


def test_gsm8k_batches_supervise_the_answers(tmp_path: Path, outside_data: Path) -> None:
    """Token counts of every batch equal those computed directly from the file."""
    path = outside_data / "sft" / "gsm8k_test.jsonl"
    recipe = build_recipe(
        tmp_path,
        str(path),
        tokenizer={"kind": "bpe", "vocab_size": 400},
        length=512,
        packing="none",
    )
    prepared = prepare_data(recipe)
    encode = prepared.tokenizer.encode
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    num_answer_tokens = [len(encode(row["answer"])) + 1 for row in rows]
    valid = [
        len(encode(row["question"] + "\n")) + count - 1 <= 512
        for row, count in zip(rows, num_answer_tokens, strict=True)
    ]
    assert prepared.report.train.num_cut == valid.count(False)
    assert prepared.report.train.counts.num_answered_supervised == sum(num_answer_tokens)
    short_rows = [number for number, is_short in enumerate(valid) if is_short]
    assert len(short_rows) > 1000
    short_only = build_recipe(
        tmp_path,
        str(path),
        tokenizer={"kind": "bpe", "vocab_size": 400},
        length=512,
        packing="none",
        overlong="drop",
    )
    dataset = prepare_data(short_only).train
    assert len(dataset) == len(short_rows)
    order = SampleOrder(0, len(dataset))
    batch = BatchPlan(512, 4, 2, 2)
    for step in (0, 7, 50):
        for rank in range(2):
            for number, micro in enumerate(
                read_step_micro_batches(dataset, order, batch, step, rank)
            ):
                first = step * 16 + (number * 2 + rank) * 4
                chosen = [
                    short_rows[order.get_index(position)] for position in range(first, first + 4)
                ]
                assert micro.num_supervised == sum(num_answer_tokens[row] for row in chosen)


def test_packed_gsm8k_supervises_every_answer(tmp_path: Path, outside_data: Path) -> None:
    path = outside_data / "sft" / "gsm8k_test.jsonl"
    recipe = build_recipe(
        tmp_path, str(path), tokenizer={"kind": "bpe", "vocab_size": 400}, length=1024
    )
    prepared = prepare_data(recipe)
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    assert prepared.report.train.num_cut == 0
    assert prepared.train.num_supervised == sum(
        len(prepared.tokenizer.encode(row["answer"])) + 1 for row in rows
    )
    assert list_supervised_texts(prepared) == sorted(
        row["answer"] + "<|endoftext|>" for row in rows
    )
    assert prepared.report.train.padding_fraction < 0.02


def test_the_terminal_shows_format_template_and_share(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = chat_recipe(tmp_path, write_records(tmp_path / "a.jsonl", *CHATS), overlong="drop")
    document = recipe.model_dump(mode="json", exclude_defaults=True)
    document["model"] = {
        "config": {
            "model_type": "llama",
            "hidden_size": 16,
            "intermediate_size": 32,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "max_position_embeddings": 64,
        }
    }
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(document))
    data_command(tmp_path / "recipe.yaml", samples=1)
    text = capsys.readouterr().out
    for message in (
        "conversations (messages)",
        "assistant turns",
        "chat template",
        "padding",
        "answer",
    ):
        assert message in text, text
    data_command(tmp_path / "recipe.yaml", samples=1, json_output=True)
    output = json.loads(capsys.readouterr().out)
    assert output["sources"][0]["records"] == "messages"
    assert output["train"]["num_supervised"] > 0
    supervised = "".join(
        span["text"] for span in output["samples"][0]["spans"] if span["supervised"]
    )
    assert re.fullmatch(r"((answer \d+)+<\|im_end\|>)+", supervised)


def test_masks_have_one_byte_per_token_for_wide_ids(tmp_path: Path) -> None:
    """Ids take four bytes here; the mask has one byte per token."""
    wide = [
        {"input_ids": [1, 2, 3], "completion_mask": [0, 1, 0]},
        {"input_ids": [4, 5, 6], "completion_mask": [0, 0, 1]},
    ]
    prepared = prepare_data(chat_recipe(tmp_path, write_records(tmp_path / "a.jsonl", *wide)))
    labels = np.concatenate(
        [prepared.train.get_sample(index).labels for index in range(len(prepared.train))]
    )
    assert sorted(labels[labels != IGNORED_LABEL].tolist()) == [2, 6]
