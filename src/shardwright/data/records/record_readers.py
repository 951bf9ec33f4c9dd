"""Conversion of a row of each record kind to a canonical record."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shardwright.config.data import IGNORED_LABEL
from shardwright.data.records.conversation import UnusableRecord, read_conversation

ALPACA_PROMPT = (
    "Below is an instruction that describes a task{}. "
    "Write a response that appropriately completes the request.\n\n"
)
ALPACA_INPUT = ", paired with an input that provides further context"


class RowFields(dict[str, Any]):
    """Values of a row by role; `column_names` maps roles to column names."""

    def __init__(self, values: Mapping[str, Any], column_names: Mapping[str, str]) -> None:
        super().__init__(values)
        self.column_names = column_names

    def read_string(self, role: str, *, is_optional: bool = False) -> str:
        """Return the text of a column; an `is_optional` column may be absent or empty."""
        value = self.get(role)
        name = self.column_names.get(role, role)
        if value is None and is_optional:
            return ""
        if not isinstance(value, str):
            raise UnusableRecord(f"{name!r} is not a string but {type(value).__name__}")
        if not is_optional and (not value or value.isspace()):
            raise UnusableRecord(f"{name!r} is empty")
        try:
            value.encode("utf-8")
        except UnicodeEncodeError as error:
            raise UnusableRecord(f"{name!r} contains an unpaired surrogate") from error
        return value

    def read_integers(self, role: str) -> list[int]:
        """Return the list of integers in a column."""
        value = self[role]
        if not isinstance(value, list) or not all(
            isinstance(item, int) and not isinstance(item, bool) for item in value
        ):
            raise UnusableRecord(f"{self.column_names[role]!r} is not a list of integers")
        return value


def _read_text(row: RowFields) -> tuple[str, Any]:
    return "text", row.read_string("text")


def _read_chat(row: RowFields) -> tuple[str, Any]:
    return "chat", read_conversation(row["messages"], row.get("tools"), row.get("system"))


def _read_alpaca(row: RowFields) -> tuple[str, Any]:
    instruction = row.read_string("instruction")
    output = row.read_string("output")
    input_text = row.read_string("input", is_optional=True)
    system = row.read_string("system", is_optional=True)
    prompt = f"{instruction}\n{input_text}" if input_text.strip() else instruction
    if row.get("history"):
        turns = []
        for exchange in row["history"]:
            if not isinstance(exchange, list) or len(exchange) != 2:
                raise UnusableRecord("'history' is not a list of pairs")
            turns += [
                {"role": "user", "content": exchange[0]},
                {"role": "assistant", "content": exchange[1]},
            ]
        turns += [{"role": "user", "content": prompt}, {"role": "assistant", "content": output}]
        return "chat", read_conversation(turns, None, system)
    head = (
        f"{system}\n\n"
        if system.strip()
        else ALPACA_PROMPT.format(ALPACA_INPUT if input_text.strip() else "")
    )
    body = f"### Instruction:\n{instruction}\n\n" + (
        f"### Input:\n{input_text}\n\n" if input_text.strip() else ""
    )
    return "pair", _build_pair(prompt, output, system, plain=f"{head}{body}### Response:\n")


def _read_prompt_response(row: RowFields) -> tuple[str, Any]:
    prompt = row.read_string("prompt")
    response = row.read_string("response")
    system = row.read_string("system", is_optional=True)
    return "pair", _build_pair(
        prompt, response, system, plain=(f"{system}\n" if system.strip() else "") + f"{prompt}\n"
    )


def _build_pair(prompt: str, response: str, system: str, *, plain: str) -> dict[str, str]:
    """Return a canonical pair; `plain` is the prompt text used without a chat template."""
    pair = {"prompt": prompt, "response": response, "plain": plain}
    return pair | ({"system": system} if system.strip() else {})


def _read_completion(row: RowFields) -> tuple[str, Any]:
    prompt = row["prompt"]
    completion = row["completion"]
    if isinstance(prompt, list) and isinstance(completion, list):  # conversations in TRL's form
        unsupervised_prompt = [
            {**turn, "loss_weight": 0} if isinstance(turn, dict) else turn for turn in prompt
        ]
        return "chat", read_conversation([*unsupervised_prompt, *completion], row.get("tools"))
    return "completion", {
        "prompt": row.read_string("prompt", is_optional=True),
        "completion": row.read_string("completion"),
    }


def _read_preference(row: RowFields) -> tuple[str, Any]:
    """Read a prompt with two responses, as strings or as turns (TRL's forms).

    The prompt of two whole conversations is the turns that they have in common.
    """
    responses = {name: row[name] for name in ("chosen", "rejected")}
    if all(isinstance(response, str) for response in responses.values()):
        if "prompt" not in row:
            raise UnusableRecord("the responses have no prompt")
        if row.get("system"):
            raise UnusableRecord(
                "a system prompt needs responses as lists of turns, not as strings"
            )
        return "preference", {
            name: {"prompt": row.read_string("prompt"), "completion": row.read_string(name)}
            for name in responses
        }
    if not all(isinstance(response, list) and response for response in responses.values()):
        raise UnusableRecord(
            "'chosen' and 'rejected' are neither two strings nor two lists of turns"
        )
    chosen = responses["chosen"]
    rejected = responses["rejected"]
    prompt: Any = row.get("prompt", [])
    if isinstance(prompt, str):
        prompt = [{"role": "user", "content": prompt}]
    if not isinstance(prompt, list):
        raise UnusableRecord("'prompt' is neither a string nor a list of turns")
    # Some files repeat the prompt in both responses. Without a prompt column, the prompt is the
    # turns that both have in common.
    common = next(
        (number for number, (a, b) in enumerate(zip(chosen, rejected, strict=False)) if a != b),
        None,
    )
    if common is None:
        raise UnusableRecord("the chosen and the rejected response are the same")
    if prompt and chosen[: len(prompt)] == prompt:
        prompt = []
    unsupervised_prompt = [
        {**turn, "loss_weight": 0} if isinstance(turn, dict) else turn
        for turn in [*prompt, *chosen[:common]]
    ]
    return "preference", {
        name: read_conversation(
            [*unsupervised_prompt, *response[common:]], row.get("tools"), row.get("system")
        )
        for name, response in responses.items()
    }


def _read_tokens(row: RowFields) -> tuple[str, Any]:
    ids = row.read_integers("input_ids")
    if not ids:
        raise UnusableRecord("the list of ids is empty")
    if min(ids) < 0 or max(ids) >= 2**32:
        raise UnusableRecord("an id is negative or not below 2^32")
    supervised = [1] * len(ids)
    if "labels" in row:
        labels = row.read_integers("labels")
        if len(labels) != len(ids):
            raise UnusableRecord(f"{len(ids)} ids but {len(labels)} labels")
        if any(
            label not in (IGNORED_LABEL, token) for label, token in zip(labels, ids, strict=True)
        ):
            raise UnusableRecord(
                "a label must be -100 or the id at the same index, without a shift"
            )
        supervised = [int(label != IGNORED_LABEL) for label in labels]
    if "mask" in row:
        mask = row.read_integers("mask")
        if len(mask) != len(ids) or not set(mask) <= {0, 1}:
            raise UnusableRecord("the mask must have a 0 or 1 for each id")
        supervised = [a & b for a, b in zip(supervised, mask, strict=True)]
    return "tokens", {"ids": ids, "supervised": supervised}


RECORD_READERS = {
    "tokens": _read_tokens,
    "messages": _read_chat,
    "sharegpt": _read_chat,
    "alpaca": _read_alpaca,
    "preference": _read_preference,
    "prompt_completion": _read_completion,
    "prompt_response": _read_prompt_response,
    "text": _read_text,
}
