"""Record kinds, detected by their columns, and their conversion to one of six canonical forms.

    text        a document, all of it supervised
    chat        a conversation, for the tokenizer's chat template
    pair        a prompt and its response: a conversation if there is a template, else one text
    completion  a prompt and its continuation, concatenated unchanged
    preference  a chosen and a rejected conversation or completion with the same prompt
    tokens      token ids, optionally with labels

A canonical record is stored as JSON text, so that it is hashed, split and deduplicated like a
text document.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from shardwright.data.conversation import ROLE_KEYS, UnusableRecord, read_conversation
from shardwright.errors import DataError

ALPACA_PROMPT = (
    "Below is an instruction that describes a task{}. "
    "Write a response that appropriately completes the request.\n\n"
)
ALPACA_INPUT = ", paired with an input that provides further context"
IGNORED_LABEL = -100


@dataclass(frozen=True)
class RecordKind:
    """Kind of record. `columns` maps roles to usual column names, the most common first."""

    summary: str
    canonical: str
    columns: Mapping[str, tuple[str, ...]]
    required: tuple[str, ...]


RECORD_KINDS: dict[str, RecordKind] = {
    "tokens": RecordKind(
        "token ids",
        "tokens",
        {
            "input_ids": ("input_ids",),
            "labels": ("labels",),
            "mask": ("completion_mask", "assistant_masks", "loss_mask"),
        },
        ("input_ids",),
    ),
    "messages": RecordKind(
        "conversations (messages)",
        "chat",
        {
            "messages": ("messages", "conversations", "conversation"),
            "tools": ("tools",),
            "system": ("system",),
        },
        ("messages",),
    ),
    "sharegpt": RecordKind(
        "conversations (ShareGPT)",
        "chat",
        {
            "messages": ("conversations", "conversation", "messages"),
            "tools": ("tools",),
            "system": ("system",),
        },
        ("messages",),
    ),
    "alpaca": RecordKind(
        "instructions (Alpaca)",
        "pair",
        {
            "instruction": ("instruction",),
            "input": ("input", "context"),
            "output": ("output", "response"),
            "system": ("system",),
            "history": ("history",),
        },
        ("instruction", "output"),
    ),
    "preference": RecordKind(
        "preferences (chosen, rejected)",
        "preference",
        {
            "chosen": ("chosen",),
            "rejected": ("rejected",),
            "prompt": ("prompt", "question"),
            "tools": ("tools",),
            "system": ("system",),
        },
        ("chosen", "rejected"),
    ),
    "prompt_completion": RecordKind(
        "prompts and completions",
        "completion",
        {"prompt": ("prompt",), "completion": ("completion",), "tools": ("tools",)},
        ("prompt", "completion"),
    ),
    "prompt_response": RecordKind(
        "questions and answers",
        "pair",
        {
            "prompt": ("prompt", "question", "query"),
            "response": ("response", "answer"),
            "system": ("system",),
        },
        ("prompt", "response"),
    ),
    "text": RecordKind("text", "text", {"text": ("text",)}, ("text",)),
}
"""Record kinds by name, in the order in which they are tried."""


@dataclass(frozen=True)
class RecordSchema:
    """Record kind of a source and its columns as (role, column name). Part of the cache key."""

    kind: str
    columns: tuple[tuple[str, str], ...]

    @property
    def canonical(self) -> str:
        """Canonical form of these records."""
        return RECORD_KINDS[self.kind].canonical

    def list_columns(self) -> list[str]:
        """Return the names of the columns that are read."""
        return [name for _, name in self.columns]

    def read_row(self, row: Mapping[str, Any]) -> tuple[str, str]:
        """Return (canonical form, content as text) of a row.

        Raises:
            Unusable: a required column is absent, or its content is invalid.
        """
        value_by_role = {
            role: row[name] for role, name in self.columns if row.get(name) is not None
        }
        for role, name in self.columns:
            if role in RECORD_KINDS[self.kind].required and role not in value_by_role:
                has = ", ".join(map(repr, list(row)[:6]))
                raise UnusableRecord(
                    f"{name!r} is null" if name in row else f"no field {name!r}; it has {has}"
                )
        canonical, content = _READERS[self.kind](_RowFields(value_by_role, dict(self.columns)))
        return canonical, content if isinstance(content, str) else json.dumps(
            content, ensure_ascii=False, sort_keys=True
        )


def build_text_schema(field: str) -> RecordSchema:
    """Return the schema of records whose text is in one column."""
    return RecordSchema("text", (("text", field),))


def detect_schema(
    rows: Sequence[Mapping[str, Any]],
    requested_kind: str,
    named_columns: Mapping[str, str],
    text_field: str,
    field: str,
) -> RecordSchema:
    """Detect the record kind of a source from the columns of its first rows.

    Args:
        requested_kind: a kind, or `auto`.
        named_columns: column names by role, from the recipe; they take precedence over the
            usual names.
        field: the recipe's field, for errors.

    Raises:
        DataError: two kinds or two columns match, a named column belongs to no kind or is
            absent, or one object wraps all records.
    """
    candidates = (
        [requested_kind]
        if requested_kind != "auto"
        else [
            kind for kind in RECORD_KINDS if set(named_columns) <= set(RECORD_KINDS[kind].columns)
        ]
    )
    if (
        any(role not in RECORD_KINDS[kind].columns for kind in candidates for role in named_columns)
        or not candidates
    ):
        allowed = "; ".join(
            f"{kind}: {', '.join(RECORD_KINDS[kind].columns)}"
            for kind in (candidates or RECORD_KINDS)
        )
        raise DataError(
            "records of this kind have no such column",
            field=f"{field}.columns",
            got=", ".join(named_columns),
            allowed=allowed,
        )
    columns = {name for row in rows for name in _list_present_columns(row)}
    if rows and (absent := [name for name in named_columns.values() if name not in columns]):
        raise DataError(
            "no such column",
            field=f"{field}.columns",
            got=absent[0],
            allowed=", ".join(sorted(columns)),
        )
    # The most frequent kind in a mixed file is the intended one; other records are broken.
    fitting_rows = {
        kind: [row for row in rows if _is_match(kind, row, named_columns, requested_kind)]
        for kind in candidates
        if kind != "text"
    }
    max_num_rows = max(map(len, fitting_rows.values()), default=0)
    best_kinds = [
        kind
        for kind, matches in fitting_rows.items()
        if max_num_rows and len(matches) == max_num_rows
    ]
    if len(best_kinds) > 1:
        raise DataError(
            "the records match several kinds",
            field=f"{field}.records",
            got=f"columns {', '.join(sorted(columns))}",
            allowed=", ".join(best_kinds),
            remedy="Set `records` to one of them",
        )
    if not best_kinds and requested_kind in ("auto", "text"):
        text = named_columns.get("text", text_field)
        if text not in columns:
            _reject_wrapped_records(rows, field)
        return build_text_schema(text)
    kind = best_kinds[0] if best_kinds else requested_kind
    present = {name for row in fitting_rows[kind] or rows for name in _list_present_columns(row)}
    return RecordSchema(kind, _choose_columns(kind, present, named_columns, field))


def _reject_wrapped_records(rows: Sequence[Mapping[str, Any]], field: str) -> None:
    """Raise if the only row is an object that wraps all records, as in some exports."""
    for name, value in rows[0].items() if len(rows) == 1 else ():
        if isinstance(value, list) and value and all(isinstance(item, dict) for item in value):
            raise DataError(
                f"the file is one object with the records in its field {name!r}",
                field=f"{field}.path",
                got=f"{len(value)} objects in {name!r}",
                allowed="a JSON array of records, or one record per line",
                remedy="Save that list as a separate file",
            )


def _list_present_columns(row: Mapping[str, Any]) -> set[str]:
    return {name for name, value in row.items() if value is not None}


def _is_match(
    kind: str, row: Mapping[str, Any], named_columns: Mapping[str, str], requested_kind: str
) -> bool:
    """Return True if a record has the columns of a kind (ShareGPT: `from`, not `role`)."""
    present = _list_present_columns(row)

    def column(role: str) -> str | None:
        names = (
            (named_columns[role],) if role in named_columns else RECORD_KINDS[kind].columns[role]
        )
        return next((name for name in names if name in present), None)

    if not all(column(role) for role in RECORD_KINDS[kind].required):
        return False
    if kind not in ("messages", "sharegpt") or requested_kind == kind:
        return True
    turns = row[column("messages") or ""]
    turn = turns[0] if isinstance(turns, list) and turns else None
    is_sharegpt = isinstance(turn, dict) and ROLE_KEYS[1] in turn and ROLE_KEYS[0] not in turn
    return is_sharegpt == (kind == "sharegpt")


def _choose_columns(
    kind: str, columns: set[str], named_columns: Mapping[str, str], field: str
) -> tuple[tuple[str, str], ...]:
    chosen = []
    for role, names in RECORD_KINDS[kind].columns.items():
        candidates = [
            name for name in names if name in columns and name not in named_columns.values()
        ]
        if role in named_columns:
            chosen.append((role, named_columns[role]))
        elif len(candidates) > 1:
            raise DataError(
                f"two columns could be the {role}",
                field=f"{field}.columns",
                got=", ".join(candidates),
                remedy=f"Choose one: `columns: {{{role}: {candidates[0]}}}`",
            )
        elif candidates or role in RECORD_KINDS[kind].required:
            chosen.append((role, candidates[0] if candidates else names[0]))
    return tuple(chosen)


class _RowFields(dict[str, Any]):
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


def _read_text(row: _RowFields) -> tuple[str, Any]:
    return "text", row.read_string("text")


def _read_chat(row: _RowFields) -> tuple[str, Any]:
    return "chat", read_conversation(row["messages"], row.get("tools"), row.get("system"))


def _read_alpaca(row: _RowFields) -> tuple[str, Any]:
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


def _read_prompt_response(row: _RowFields) -> tuple[str, Any]:
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


def _read_completion(row: _RowFields) -> tuple[str, Any]:
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


def _read_preference(row: _RowFields) -> tuple[str, Any]:
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


def _read_tokens(row: _RowFields) -> tuple[str, Any]:
    ids = row.read_integers("input_ids")
    if not ids:
        raise UnusableRecord("the list of ids is empty")
    if min(ids) < 0 or max(ids) >= 2**32:
        raise UnusableRecord("an id is negative or not below 2^32")
    supervised = [1] * len(ids)
    if "labels" in row:
        labels = row.read_integers("labels")
        if len(labels) != len(ids):
            raise UnusableRecord(f"{len(ids)} ids and {len(labels)} labels")
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


def extract_texts(canonical: str, content: str) -> list[str]:
    """Return the texts of a canonical record other than plain text, to train a tokenizer on.

    Raises:
        DataError: the record is token ids.
    """
    record = json.loads(content)
    if canonical == "chat":
        return [turn["content"] for turn in record["messages"] if turn["content"]]
    if canonical == "pair":
        return [record["plain"], record["response"]]
    if canonical == "completion":
        return [record["prompt"], record["completion"]]
    if canonical == "preference":
        return [
            text
            for response in record.values()
            for text in extract_texts(
                "chat" if "messages" in response else "completion", json.dumps(response)
            )
        ]
    raise DataError(
        "a tokenizer cannot be trained on token ids",
        field="tokenizer.kind",
        allowed="huggingface",
        remedy="Set tokenizer.path to the tokenizer that encoded the ids",
    )


_READERS = {
    "tokens": _read_tokens,
    "messages": _read_chat,
    "sharegpt": _read_chat,
    "alpaca": _read_alpaca,
    "preference": _read_preference,
    "prompt_completion": _read_completion,
    "prompt_response": _read_prompt_response,
    "text": _read_text,
}

__all__ = [
    "RECORD_KINDS",
    "RecordKind",
    "RecordSchema",
    "UnusableRecord",
    "build_text_schema",
    "detect_schema",
    "extract_texts",
]
