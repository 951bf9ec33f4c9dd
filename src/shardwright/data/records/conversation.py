"""Conversations in several dialects, normalised to the form of transformers' chat templates.

The form is `{"messages": [turn, ...], "tools": [...]}` with turns `{"role", "content",
"reasoning_content", "tool_calls", "name", "tool_call_id", "loss_weight"}`. All keys except role
and content are optional.
"""

from __future__ import annotations

import json
import math
from typing import Any

ROLE_ALIASES = {
    **dict.fromkeys(("user", "human", "prompter", "instruction"), "user"),
    **dict.fromkeys(
        ("assistant", "gpt", "model", "chatgpt", "bot", "chatbot", "bing", "bard", "function_call"),
        "assistant",
    ),
    "system": "system",
    "developer": "developer",
    **dict.fromkeys(
        ("tool", "function", "observation", "ipython", "tool_response", "function_response"), "tool"
    ),
}
ROLE_KEYS = ("role", "from")
CONTENT_KEYS = ("content", "value")
REASONING_KEYS = ("reasoning_content", "thinking", "reasoning")
MAX_LOSS_WEIGHT = 1000
"""Maximum loss weight of a turn; a larger one is a mistake and would outweigh all other
turns."""
_TEXT_KEYS = ("text", "value", "content")


class UnusableRecord(Exception):
    """Raised for a record that is skipped; the message is the reason."""


def read_conversation(turns: Any, tools: Any = None, system: Any = None) -> dict[str, Any]:
    """Normalise a conversation.

    Raises:
        Unusable: empty turns, unknown roles or roles out of order, tool calls without their
            fields, content that is not text, invalid loss weights.
    """
    if isinstance(turns, str):
        turns = _parse_json(turns, "the conversation")
    if not isinstance(turns, list) or not turns:
        problem = "has no turns" if turns in ([], None, "") else "is not a list of turns"
        raise UnusableRecord(f"the conversation {problem}")
    messages = [_read_turn(turn, number) for number, turn in enumerate(turns, start=1)]
    if system is not None and str(system).strip():
        if messages[0]["role"] == "system":
            raise UnusableRecord(
                "there are two system prompts, in the conversation and in a column"
            )
        messages.insert(0, {"role": "system", "content": _read_text(system, "the system prompt")})
    _check_order(messages)
    conversation: dict[str, Any] = {"messages": messages}
    if tool_list := _read_tools(tools):
        conversation["tools"] = tool_list
    return conversation


def _read_turn(turn: Any, turn_number: int) -> dict[str, Any]:
    where = f"turn {turn_number}"
    if not isinstance(turn, dict):
        raise UnusableRecord(f"{where} is not an object but {type(turn).__name__}")
    role = _find_first(turn, ROLE_KEYS)
    if role is None:
        raise UnusableRecord(f"{where} has no role; it has {', '.join(map(repr, list(turn)[:6]))}")
    if role not in ROLE_ALIASES:
        raise UnusableRecord(f"{where} has the unknown role {role!r}")
    message: dict[str, Any] = {
        "role": ROLE_ALIASES[role],
        "content": _read_text(_find_first(turn, CONTENT_KEYS), where),
    }
    calls = _read_calls(turn.get("tool_calls"), where)
    if role == "function_call":
        calls = _read_calls(_parse_json(message["content"], f"the tool call of {where}"), where)
        message["content"] = ""
    if calls:
        message["tool_calls"] = calls
    reasoning = _find_first(turn, REASONING_KEYS)
    if reasoning is not None and _read_text(reasoning, f"the reasoning of {where}").strip():
        message["reasoning_content"] = _read_text(reasoning, f"the reasoning of {where}")
    for key in ("name", "tool_call_id"):
        if turn.get(key) is not None:
            message[key] = str(turn[key])
    if not message["content"].strip() and not calls:
        raise UnusableRecord(f"{where} ({role}) is empty")
    if calls and message["role"] != "assistant":
        raise UnusableRecord(f"{where} ({role}) calls a tool; only the assistant may")
    weight = turn.get("loss_weight", turn.get("weight"))
    if weight is not None:
        message["loss_weight"] = _read_weight(weight, where)
    return message


def _find_first(turn: dict[str, Any], keys: tuple[str, ...]) -> Any:
    return next((turn[key] for key in keys if turn.get(key) is not None), None)


def _read_text(content: Any, location: str) -> str:
    """Return the text of a turn: a string, a list of text parts, or None (tool calls only)."""
    if content is None:
        return ""
    if isinstance(content, dict):
        content = [content]
    if isinstance(content, list):
        return "".join(_read_part(part, location) for part in content)
    if not isinstance(content, str):
        raise UnusableRecord(f"{location} has content of type {type(content).__name__}, not text")
    try:
        content.encode("utf-8")
    except UnicodeEncodeError as error:
        raise UnusableRecord(f"{location} contains an unpaired surrogate") from error
    return content


def _read_part(part: Any, location: str) -> str:
    if isinstance(part, str):
        return _read_text(part, location)
    if not isinstance(part, dict) or part.get("type", "text") != "text":
        kind = part.get("type") if isinstance(part, dict) else type(part).__name__
        raise UnusableRecord(f"{location} has a part of type {kind!r}; only text is supported")
    text = next((part[key] for key in _TEXT_KEYS if part.get(key) is not None), None)
    if not isinstance(text, str):
        raise UnusableRecord(f"{location} has a part of type 'text' without text")
    return _read_text(text, location)


def _read_weight(weight: Any, location: str) -> float | int:
    """Return a loss weight; 0.0 and 1.0 become integers, so equal records have equal hashes."""
    is_number = isinstance(weight, int | float) and math.isfinite(weight)
    if not is_number or not 0 <= weight <= MAX_LOSS_WEIGHT:
        raise UnusableRecord(
            f"{location} has the loss weight {weight!r}; "
            f"allowed is a number from 0 (not supervised) to {MAX_LOSS_WEIGHT}"
        )
    return int(weight) if weight in (0, 1) else float(weight)


def _read_calls(calls: Any, location: str) -> list[dict[str, Any]]:
    if isinstance(calls, dict):
        calls = [calls]
    if calls is None or calls == []:
        return []
    if isinstance(calls, str):
        calls = _parse_json(calls, f"tool_calls of {location}")
    if not isinstance(calls, list):
        raise UnusableRecord(f"tool_calls of {location} is not a list")
    return [_read_call(call, location) for call in calls]


def _read_call(call: Any, location: str) -> dict[str, Any]:
    function = call.get("function", call) if isinstance(call, dict) else None
    if (
        not isinstance(function, dict)
        or not isinstance(function.get("name"), str)
        or not function["name"]
    ):
        raise UnusableRecord(f"a tool call of {location} has no function name")
    if function.get("arguments") is None:
        raise UnusableRecord(f"the tool call {function['name']!r} of {location} has no arguments")
    arguments = function["arguments"]
    if isinstance(arguments, str):
        name = function["name"]
        arguments = _parse_json(arguments, f"the arguments of the tool call {name!r} of {location}")
    if not isinstance(arguments, dict):
        raise UnusableRecord(
            f"the arguments of the tool call {function['name']!r} of {location} are not an object"
        )
    # Columnar files fill absent arguments with nulls.
    arguments = {key: value for key, value in arguments.items() if value is not None}
    values: dict[str, Any] = {
        "type": "function",
        "function": {key: function[key] for key in function if key in ("name", "arguments")}
        | {"arguments": arguments},
    }
    if call.get("id") is not None:
        values["id"] = str(call["id"])
    # Keys have the order of the file: templates render calls as JSON.
    return {key: values[key] for key in dict.fromkeys((*call, *values)) if key in values}


def _read_tools(tools: Any) -> list[dict[str, Any]]:
    if isinstance(tools, str) and tools.strip():
        tools = _parse_json(tools, "the tools")
    if not tools:
        return []
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise UnusableRecord("the tools are not a list of descriptions")
    for tool in tools:
        function = tool.get("function", tool)
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise UnusableRecord("a tool has no name")
    return tools


def _check_order(messages: list[dict[str, Any]]) -> None:
    """Check that user and assistant alternate, with optional system prompt and tool results."""
    previous_role = None
    for number, message in enumerate(messages, start=1):
        role = message["role"]
        allowed = {
            None: ("system", "developer", "user"),
            "system": ("user",),
            "developer": ("user",),
            "user": ("assistant",),
            "assistant": ("tool", "user")
            if previous_role is not None and "tool_calls" in messages[number - 2]
            else ("user",),
            "tool": ("tool", "assistant"),
        }[previous_role]
        if role not in allowed:
            place = f"after {previous_role!r}" if previous_role else "at the beginning"
            raise UnusableRecord(
                f"roles out of order: turn {number} is {role!r} {place}; "
                f"expected {' or '.join(allowed)}"
            )
        previous_role = role
    if previous_role != "assistant":
        raise UnusableRecord(
            f"roles out of order: the last turn is {previous_role!r}, not 'assistant'"
        )


def _parse_json(text: str, subject: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UnusableRecord(f"{subject}: not JSON ({error})") from error
