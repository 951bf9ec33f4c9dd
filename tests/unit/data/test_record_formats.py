"""Formats of records: detection from their columns, and the errors of invalid records."""

from __future__ import annotations

import json
from typing import Any

import pytest

from shardwright.data.records.conversation import UnusableRecord, read_conversation
from shardwright.data.records.record_formats import RecordSchema, detect_schema, extract_texts
from shardwright.errors import DataError
from tests.unit.data.chat_tokenizers import turns

SHAREGPT = [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "hello"}]
CALL = {"type": "function", "function": {"name": "weather", "arguments": {"city": "Oslo"}}}


def detect(
    *rows: dict[str, Any], kind: str = "auto", named: dict[str, str] | None = None
) -> RecordSchema:
    return detect_schema(rows, kind, named or {}, "text", "data.sources.0")


def read_record(row: dict[str, Any]) -> tuple[str, Any]:
    canonical, content = detect(row).read_row(row)
    return canonical, content if canonical == "text" else json.loads(content)


@pytest.mark.parametrize(
    ("row", "kind", "columns"),
    [
        ({"text": "a"}, "text", {"text": "text"}),
        ({"messages": turns("a", "b")}, "messages", {"messages": "messages"}),
        (
            {"messages": turns("a", "b"), "prompt": "a", "tools": []},
            "messages",
            {"messages": "messages", "tools": "tools"},
        ),
        (
            {"conversations": SHAREGPT, "system": "s"},
            "sharegpt",
            {"messages": "conversations", "system": "system"},
        ),
        ({"conversations": turns("a", "b")}, "messages", {"messages": "conversations"}),
        ({"messages": SHAREGPT}, "sharegpt", {"messages": "messages"}),
        (
            {"instruction": "a", "input": "", "output": "b"},
            "alpaca",
            {"instruction": "instruction", "input": "input", "output": "output"},
        ),
        (
            {"instruction": "a", "context": "c", "response": "b"},
            "alpaca",
            {"instruction": "instruction", "input": "context", "output": "response"},
        ),
        (
            {"instruction": "a", "output": "b", "text": "a b"},
            "alpaca",
            {"instruction": "instruction", "output": "output"},
        ),
        (
            {"question": "a", "answer": "b"},
            "prompt_response",
            {"prompt": "question", "response": "answer"},
        ),
        (
            {"prompt": "a", "response": "b"},
            "prompt_response",
            {"prompt": "prompt", "response": "response"},
        ),
        (
            {"prompt": "a", "completion": "b"},
            "prompt_completion",
            {"prompt": "prompt", "completion": "completion"},
        ),
        ({"input_ids": [1, 2], "attention_mask": [1, 1]}, "tokens", {"input_ids": "input_ids"}),
    ],
)
def test_kinds_are_detected_from_columns(
    row: dict[str, Any], kind: str, columns: dict[str, str]
) -> None:
    schema = detect(row)
    assert (schema.kind, dict(schema.columns)) == (kind, columns)


def test_the_kind_of_the_majority_is_the_kind_of_all() -> None:
    rows = [
        {"messages": turns("a", "b")},
        {"instruction": "a", "output": "b"},
        {"messages": turns("c", "d"), "tools": []},
    ]
    assert detect(*rows) == RecordSchema("messages", (("messages", "messages"), ("tools", "tools")))
    with pytest.raises(DataError, match=r"several kinds.*messages, alpaca"):
        detect(*rows[:2])


def test_columns_of_the_recipe_override_detection() -> None:
    row = {"q": "what", "solution": "that", "text": "other"}
    schema = detect(row, named={"prompt": "q", "response": "solution"})
    assert schema.kind == "prompt_response"
    assert json.loads(schema.read_row(row)[1])["response"] == "that"
    assert detect(row, named={"text": "solution"}).read_row(row) == ("text", "that")
    assert detect({"messages": turns("a", "b"), "text": "x"}, kind="text").kind == "text"


@pytest.mark.parametrize(
    ("row", "options", "message"),
    [
        (
            {"prompt": "a", "question": "b", "answer": "c"},
            {},
            "two columns could be the prompt.*prompt, question",
        ),
        (
            {"messages": turns("a", "b"), "prompt": "a", "response": "b"},
            {},
            "several kinds.*messages, prompt_response",
        ),
        ({"prompt": "a", "completion": "b", "response": "c"}, {}, "several kinds"),
        ({"q": "a"}, {"named": {"prompt": "qq", "response": "a"}}, "no such column.*qq"),
        (
            {"q": "a"},
            {"named": {"nonsense": "q"}},
            "records of this kind have no such column.*nonsense",
        ),
        (
            {"q": "a"},
            {"kind": "messages", "named": {"prompt": "q"}},
            r"records of this kind have no such column.*messages, tools",
        ),
    ],
)
def test_ambiguous_columns_are_an_error(
    row: dict[str, Any], options: dict[str, Any], message: str
) -> None:
    with pytest.raises(DataError, match=message):
        detect(row, **options)


def test_parts_weights_and_names_are_normalised() -> None:
    conversation = [
        {
            "role": "human",
            "content": [{"type": "text", "value": "a"}, {"type": "text", "text": "b"}],
            "loss_weight": 0.0,
        },
        {"from": "gpt", "value": "c", "thinking": "hm", "weight": 1},
    ]
    assert read_conversation(conversation, None, "be kind")["messages"] == [
        {"role": "system", "content": "be kind"},
        {"role": "user", "content": "ab", "loss_weight": 0},
        {"role": "assistant", "content": "c", "reasoning_content": "hm", "loss_weight": 1},
    ]


def test_tool_calls_are_normalised() -> None:
    conversation = [
        {"role": "user", "content": "weather?"},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"function": {"name": "weather", "arguments": '{"city": "Oslo"}'}}],
        },
        {"role": "tool", "content": "rain"},
        {"role": "assistant", "content": "It rains."},
    ]
    normalised = read_conversation(
        conversation, json.dumps([{"type": "function", "function": {"name": "weather"}}])
    )
    assert normalised["messages"][1] == {"role": "assistant", "content": "", "tool_calls": [CALL]}
    assert normalised["tools"][0]["function"]["name"] == "weather"
    sharegpt = [
        {"from": "human", "value": "weather?"},
        {"from": "function_call", "value": '{"name": "weather", "arguments": {"city": "Oslo"}}'},
        {"from": "observation", "value": "rain"},
        {"from": "gpt", "value": "It rains."},
    ]
    assert read_conversation(sharegpt)["messages"] == normalised["messages"]


def test_equal_conversations_have_equal_text() -> None:
    """Own keys are sorted, those of tools and calls are not: templates render them as JSON."""
    schema = RecordSchema("messages", (("messages", "messages"), ("tools", "tools")))
    one = {"role": "user", "content": "x"}
    other = dict(reversed(one.items()))
    answer = {"content": "y", "role": "assistant"}
    assert schema.read_row({"messages": [one, answer]}) == schema.read_row(
        {"messages": [other, answer]}
    )
    call = {"function": {"arguments": {"b": 1, "a": 2}, "name": "f"}, "type": "function"}
    tool = {"name": "f", "description": "d"}
    row = {"messages": [one, {"role": "assistant", "tool_calls": [call]}], "tools": [tool]}
    content = json.loads(schema.read_row(row)[1])
    assert json.dumps(content["messages"][1]["tool_calls"]) == json.dumps([call])
    assert json.dumps(content["tools"]) == json.dumps([tool])
    assert list(content) == ["messages", "tools"]


def make_tool_call(**function: Any) -> list[dict[str, Any]]:
    return [
        {"role": "user", "content": "x"},
        {"role": "assistant", "tool_calls": [{"function": function}]},
        {"role": "tool", "content": "y"},
        {"role": "assistant", "content": "z"},
    ]


@pytest.mark.parametrize(
    ("conversation", "message"),
    [
        ([], "no turns"),
        ("{", "not JSON"),
        ("hello", "not JSON"),
        ({"role": "user"}, "not a list"),
        (["hi"], "turn 1 is not an object"),
        ([{"content": "x"}], "turn 1 has no role"),
        (turns("a", " \n"), r"turn 2 \(assistant\) is empty"),
        ([{"role": "robot", "content": "x"}], "'robot'"),
        (turns("a", "b", "c"), "last turn is 'user'"),
        ([*turns("a", "b")[::-1]], "turn 1 is 'assistant' at the beginning"),
        ([*turns("a"), *turns("b", "c")], "turn 2 is 'user' after 'user'"),
        ([*turns("a", "b"), {"role": "system", "content": "s"}], "'system' after 'assistant'"),
        ([*turns("a", "b"), {"role": "tool", "content": "s"}], "'tool' after 'assistant'"),
        ([{"role": "user", "content": 5}], "turn 1 has content of type int, not text"),
        ([{"role": "user", "content": [{"type": "image", "url": "x"}]}], "'image'"),
        ([{"role": "user", "content": [{"type": "text"}]}], "without text"),
        ([{"role": "user", "content": "\ud800"}], "surrogate"),
        (make_tool_call(arguments={}), "no function name"),
        (make_tool_call(name="f"), "'f' of turn 2 has no arguments"),
        (
            make_tool_call(name="f", arguments="{"),
            "arguments of the tool call 'f' of turn 2: not JSON",
        ),
        (make_tool_call(name="f", arguments=[1]), "not an object"),
        ([{"role": "user", "content": "x", "tool_calls": [CALL]}], "only the assistant"),
    ],
)
def test_an_invalid_conversation_is_an_error_with_a_reason(conversation: Any, message: str) -> None:
    with pytest.raises(UnusableRecord, match=message):
        read_conversation(conversation)


@pytest.mark.parametrize("weight", [-1, "1", float("nan"), float("inf"), 1001, [1]])
def test_an_invalid_weight_is_an_error(weight: object) -> None:
    with pytest.raises(UnusableRecord, match=r"turn 1 has the loss weight.*number from 0"):
        read_conversation([{"role": "user", "content": "x", "loss_weight": weight}])


@pytest.mark.parametrize(
    ("weight", "expected"), [(0.0, "0"), (True, "1"), (1.0, "1"), (0.3, "0.3"), (2, "2.0")]
)
def test_a_weight_is_preserved(weight: object, expected: str) -> None:
    turns = [
        {"role": "user", "content": "x", "loss_weight": weight},
        {"role": "assistant", "content": "y"},
    ]
    assert repr(read_conversation(turns)["messages"][0]["loss_weight"]) == expected


def test_pairs_have_a_plain_prompt_without_a_template() -> None:
    canonical, pair = read_record({"instruction": "Add.", "input": "1 2", "output": "3"})
    assert (canonical, pair["prompt"], pair["response"]) == ("pair", "Add.\n1 2", "3")
    assert pair["plain"].startswith(
        "Below is an instruction that describes a task, paired with an input"
    )
    assert pair["plain"].endswith("### Instruction:\nAdd.\n\n### Input:\n1 2\n\n### Response:\n")
    assert read_record({"question": "1 + 2?", "answer": "3"})[1]["plain"] == "1 + 2?\n"
    assert read_record({"instruction": "a", "output": "b", "history": [["x", "y"]]}) == (
        "chat",
        {"messages": turns("x", "y", "a", "b")},
    )


def test_prompt_and_completion_may_be_conversations() -> None:
    canonical, chat = read_record(
        {"prompt": turns("a", "b", "c"), "completion": [{"role": "assistant", "content": "d"}]}
    )
    assert canonical == "chat"
    assert [turn.get("loss_weight") for turn in chat["messages"]] == [0, 0, 0, None]


def test_token_ids_carry_their_supervision() -> None:
    assert read_record({"input_ids": [5, 6, 7]}) == (
        "tokens",
        {"ids": [5, 6, 7], "supervised": [1, 1, 1]},
    )
    assert read_record({"input_ids": [5, 6, 7], "labels": [-100, 6, 7]})[1]["supervised"] == [
        0,
        1,
        1,
    ]
    assert read_record({"input_ids": [5, 6, 7], "completion_mask": [0, 0, 1]})[1]["supervised"] == [
        0,
        0,
        1,
    ]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"input_ids": [1, 2], "labels": [2, -100]}, "without a shift"),
        ({"input_ids": [1, 2], "labels": [1]}, "2 ids but 1 labels"),
        ({"input_ids": [1, -2]}, "an id is negative"),
        ({"input_ids": [1, "2"]}, "not a list of integers"),
        ({"input_ids": [1, 2], "loss_mask": [1, 2]}, "0 or 1"),
        ({"question": "q", "answer": " "}, "'answer' is empty"),
        ({"question": ["q"], "answer": "a"}, "'question' is not a string but list"),
        ({"instruction": "i", "output": "o", "history": [["a"]]}, "list of pairs"),
    ],
)
def test_invalid_columns_are_an_error_with_a_reason(row: dict[str, Any], message: str) -> None:
    with pytest.raises(UnusableRecord, match=message):
        detect(row).read_row(row)


def test_the_error_for_a_record_of_another_kind_lists_its_fields() -> None:
    records = detect({"messages": turns("a", "b")})
    with pytest.raises(
        UnusableRecord, match=r"no field 'messages'; it has 'instruction', 'output'"
    ):
        records.read_row({"instruction": "a", "output": "b"})


def test_tokenizers_are_trained_on_the_texts_of_records() -> None:
    assert extract_texts("chat", json.dumps({"messages": turns("a", "b")})) == ["a", "b"]
    assert extract_texts("completion", json.dumps({"prompt": "a", "completion": "b"})) == ["a", "b"]
    with pytest.raises(DataError, match="cannot be trained on token ids"):
        extract_texts("tokens", "{}")
