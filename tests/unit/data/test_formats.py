"""What records hold, found by looking; and the reasons why a record is none."""

from __future__ import annotations

import json
from typing import Any

import pytest

from shardwright.data.conversation import UnusableRecord, read_conversation
from shardwright.data.record_formats import RecordSchema, detect_schema, extract_texts
from shardwright.errors import DataError
from tests.unit.data.chat_tokenizers import turns

SHAREGPT = [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "hello"}]
CALL = {"type": "function", "function": {"name": "weather", "arguments": {"city": "Oslo"}}}


def look(
    *rows: dict[str, Any], asked: str = "auto", named: dict[str, str] | None = None
) -> RecordSchema:
    return detect_schema(rows, asked, named or {}, "text", "data.sources.0")


def read(row: dict[str, Any]) -> tuple[str, Any]:
    canonical, content = look(row).read_row(row)
    return canonical, content if canonical == "text" else json.loads(content)


@pytest.mark.parametrize(
    ("row", "kind", "columns"),
    [
        ({"text": "a"}, "text", {"text": "text"}),
        ({"messages": turns("a", "b")}, "messages", {"messages": "messages"}),
        ({"messages": turns("a", "b"), "prompt": "a", "tools": []}, "messages", {"messages": "messages", "tools": "tools"}),
        ({"conversations": SHAREGPT, "system": "s"}, "sharegpt", {"messages": "conversations", "system": "system"}),
        ({"conversations": turns("a", "b")}, "messages", {"messages": "conversations"}),
        ({"messages": SHAREGPT}, "sharegpt", {"messages": "messages"}),
        ({"instruction": "a", "input": "", "output": "b"}, "alpaca",
         {"instruction": "instruction", "input": "input", "output": "output"}),
        ({"instruction": "a", "context": "c", "response": "b"}, "alpaca",
         {"instruction": "instruction", "input": "context", "output": "response"}),
        ({"instruction": "a", "output": "b", "text": "a b"}, "alpaca", {"instruction": "instruction", "output": "output"}),
        ({"question": "a", "answer": "b"}, "prompt_response", {"prompt": "question", "response": "answer"}),
        ({"prompt": "a", "response": "b"}, "prompt_response", {"prompt": "prompt", "response": "response"}),
        ({"prompt": "a", "completion": "b"}, "prompt_completion", {"prompt": "prompt", "completion": "completion"}),
        ({"input_ids": [1, 2], "attention_mask": [1, 1]}, "tokens", {"input_ids": "input_ids"}),
    ],
)  # fmt: skip
def test_kinds_are_found_by_their_columns(
    row: dict[str, Any], kind: str, columns: dict[str, str]
) -> None:
    found = look(row)
    assert (found.kind, dict(found.columns)) == (kind, columns)


def test_what_most_records_are_is_the_kind_of_all() -> None:
    rows = [
        {"messages": turns("a", "b")},
        {"instruction": "a", "output": "b"},
        {"messages": turns("c", "d"), "tools": []},
    ]
    assert look(*rows) == RecordSchema("messages", (("messages", "messages"), ("tools", "tools")))
    with pytest.raises(DataError, match=r"several kinds.*messages, alpaca"):
        look(*rows[:2])


def test_named_columns_decide() -> None:
    row = {"q": "what", "solution": "that", "text": "other"}
    found = look(row, named={"prompt": "q", "response": "solution"})
    assert found.kind == "prompt_response"
    assert json.loads(found.read_row(row)[1])["response"] == "that"
    assert look(row, named={"text": "solution"}).read_row(row) == ("text", "that")
    assert look({"messages": turns("a", "b"), "text": "x"}, asked="text").kind == "text"


@pytest.mark.parametrize(
    ("row", "more", "words"),
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
            {"asked": "messages", "named": {"prompt": "q"}},
            r"records of this kind have no such column.*messages, tools",
        ),
    ],
)
def test_what_could_be_two_things_is_asked_about(
    row: dict[str, Any], more: dict[str, Any], words: str
) -> None:
    with pytest.raises(DataError, match=words):
        look(row, **more)


def test_parts_weights_and_names_come_to_one_form() -> None:
    given = [
        {
            "role": "human",
            "content": [{"type": "text", "value": "a"}, {"type": "text", "text": "b"}],
            "loss_weight": 0.0,
        },
        {"from": "gpt", "value": "c", "thinking": "hm", "weight": 1},
    ]
    assert read_conversation(given, None, "be kind")["messages"] == [
        {"role": "system", "content": "be kind"},
        {"role": "user", "content": "ab", "loss_weight": 0},
        {"role": "assistant", "content": "c", "reasoning_content": "hm", "loss_weight": 1},
    ]


def test_tool_calls_come_to_one_form() -> None:
    given = [
        {"role": "user", "content": "weather?"},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"function": {"name": "weather", "arguments": '{"city": "Oslo"}'}}],
        },
        {"role": "tool", "content": "rain"},
        {"role": "assistant", "content": "It rains."},
    ]
    found = read_conversation(
        given, json.dumps([{"type": "function", "function": {"name": "weather"}}])
    )
    assert found["messages"][1] == {"role": "assistant", "content": "", "tool_calls": [CALL]}
    assert found["tools"][0]["function"]["name"] == "weather"
    sharegpt = [
        {"from": "human", "value": "weather?"},
        {"from": "function_call", "value": '{"name": "weather", "arguments": {"city": "Oslo"}}'},
        {"from": "observation", "value": "rain"},
        {"from": "gpt", "value": "It rains."},
    ]
    assert read_conversation(sharegpt)["messages"] == found["messages"]


def call_of(**function: Any) -> list[dict[str, Any]]:
    return [
        {"role": "user", "content": "x"},
        {"role": "assistant", "tool_calls": [{"function": function}]},
        {"role": "tool", "content": "y"},
        {"role": "assistant", "content": "z"},
    ]


@pytest.mark.parametrize(
    ("given", "words"),
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
        (call_of(arguments={}), "no function name"),
        (call_of(name="f"), "'f' of turn 2 has no arguments"),
        (call_of(name="f", arguments="{"), "arguments of the tool call 'f' of turn 2: not JSON"),
        (call_of(name="f", arguments=[1]), "not an object"),
        ([{"role": "user", "content": "x", "tool_calls": [CALL]}], "only the assistant"),
    ],
)
def test_a_conversation_that_is_none_says_why(given: Any, words: str) -> None:
    with pytest.raises(UnusableRecord, match=words):
        read_conversation(given)


@pytest.mark.parametrize("weight", [-1, "1", float("nan"), float("inf"), 1001, [1]])
def test_a_weight_that_is_none_is_not_guessed(weight: object) -> None:
    with pytest.raises(UnusableRecord, match=r"turn 1 has the loss weight.*number from 0"):
        read_conversation([{"role": "user", "content": "x", "loss_weight": weight}])


@pytest.mark.parametrize(
    ("weight", "read"), [(0.0, "0"), (True, "1"), (1.0, "1"), (0.3, "0.3"), (2, "2.0")]
)
def test_a_weight_is_kept_as_it_is(weight: object, read: str) -> None:
    turns = [
        {"role": "user", "content": "x", "loss_weight": weight},
        {"role": "assistant", "content": "y"},
    ]
    assert repr(read_conversation(turns)["messages"][0]["loss_weight"]) == read


def test_pairs_know_their_prompt_without_a_template() -> None:
    canonical, pair = read({"instruction": "Add.", "input": "1 2", "output": "3"})
    assert (canonical, pair["prompt"], pair["response"]) == ("pair", "Add.\n1 2", "3")
    assert pair["plain"].startswith(
        "Below is an instruction that describes a task, paired with an input"
    )
    assert pair["plain"].endswith("### Instruction:\nAdd.\n\n### Input:\n1 2\n\n### Response:\n")
    assert read({"question": "1 + 2?", "answer": "3"})[1]["plain"] == "1 + 2?\n"
    assert read({"instruction": "a", "output": "b", "history": [["x", "y"]]}) == (
        "chat",
        {"messages": turns("x", "y", "a", "b")},
    )


def test_prompt_and_completion_may_be_conversations() -> None:
    canonical, chat = read(
        {"prompt": turns("a", "b", "c"), "completion": [{"role": "assistant", "content": "d"}]}
    )
    assert canonical == "chat"
    assert [turn.get("loss_weight") for turn in chat["messages"]] == [0, 0, 0, None]


def test_given_ids_carry_what_is_learnt() -> None:
    assert read({"input_ids": [5, 6, 7]}) == ("tokens", {"ids": [5, 6, 7], "supervised": [1, 1, 1]})
    assert read({"input_ids": [5, 6, 7], "labels": [-100, 6, 7]})[1]["supervised"] == [0, 1, 1]
    assert read({"input_ids": [5, 6, 7], "completion_mask": [0, 0, 1]})[1]["supervised"] == [
        0,
        0,
        1,
    ]


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"input_ids": [1, 2], "labels": [2, -100]}, "without a shift"),
        ({"input_ids": [1, 2], "labels": [1]}, "2 ids and 1 labels"),
        ({"input_ids": [1, -2]}, "an id is negative"),
        ({"input_ids": [1, "2"]}, "not a list of integers"),
        ({"input_ids": [1, 2], "loss_mask": [1, 2]}, "0 or 1"),
        ({"question": "q", "answer": " "}, "'answer' is empty"),
        ({"question": ["q"], "answer": "a"}, "'question' is not a string but list"),
        ({"instruction": "i", "output": "o", "history": [["a"]]}, "list of pairs"),
    ],
)
def test_wrong_columns_say_why(row: dict[str, Any], words: str) -> None:
    with pytest.raises(UnusableRecord, match=words):
        look(row).read_row(row)


def test_a_record_of_another_kind_says_what_it_has() -> None:
    records = look({"messages": turns("a", "b")})
    with pytest.raises(
        UnusableRecord, match=r"no field 'messages'; it has 'instruction', 'output'"
    ):
        records.read_row({"instruction": "a", "output": "b"})


def test_tokenizers_are_trained_on_the_texts_of_records() -> None:
    assert extract_texts("chat", json.dumps({"messages": turns("a", "b")})) == ["a", "b"]
    assert extract_texts("completion", json.dumps({"prompt": "a", "completion": "b"})) == ["a", "b"]
    with pytest.raises(DataError, match="cannot be trained on token ids"):
        extract_texts("tokens", "{}")
