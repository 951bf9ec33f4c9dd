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

from shardwright.data.records.conversation import ROLE_KEYS, UnusableRecord
from shardwright.data.records.record_readers import RECORD_READERS, RowFields
from shardwright.errors import DataError


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

_RENDERED_AS_JSON = ("tools", "tool_calls")


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
        canonical, content = RECORD_READERS[self.kind](RowFields(value_by_role, dict(self.columns)))
        return canonical, content if isinstance(content, str) else json.dumps(
            _sort_own_keys(content), ensure_ascii=False
        )


def _sort_own_keys(value: Any) -> Any:
    """Sort the keys of a canonical record, so that equal records have equal text.

    Tools and calls keep the order of the file: chat templates render them as JSON, and at
    inference transformers renders them in the order that it is given.
    """
    if isinstance(value, dict):
        return {
            key: value[key] if key in _RENDERED_AS_JSON else _sort_own_keys(value[key])
            for key in sorted(value)
        }
    if isinstance(value, list) and value and isinstance(value[0], dict):
        return [_sort_own_keys(item) for item in value]
    return value


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
