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

from shardwright.data.conversation import ROLE_KEYS, Unusable, read_conversation
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


KINDS: dict[str, RecordKind] = {
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
        {"messages": ("messages", "conversations", "conversation"), "tools": ("tools",), "system": ("system",)},
        ("messages",),
    ),
    "sharegpt": RecordKind(
        "conversations (ShareGPT)",
        "chat",
        {"messages": ("conversations", "conversation", "messages"), "tools": ("tools",), "system": ("system",)},
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
        {"prompt": ("prompt", "question", "query"), "response": ("response", "answer"), "system": ("system",)},
        ("prompt", "response"),
    ),
    "text": RecordKind("text", "text", {"text": ("text",)}, ("text",)),
}
"""Record kinds by name, in the order in which they are tried."""


@dataclass(frozen=True)
class Records:
    """Record kind of a source and its columns as (role, column name). Part of the cache key."""

    kind: str
    columns: tuple[tuple[str, str], ...]

    @property
    def canonical(self) -> str:
        """Canonical form of these records."""
        return KINDS[self.kind].canonical

    def column_names(self) -> list[str]:
        """Return the names of the columns that are read."""
        return [name for _, name in self.columns]

    def read(self, row: Mapping[str, Any]) -> tuple[str, str]:
        """Return (canonical form, content as text) of a row.

        Raises:
            Unusable: a required column is absent, or its content is invalid.
        """
        value_by_role = {role: row[name] for role, name in self.columns if row.get(name) is not None}
        for role, name in self.columns:
            if role in KINDS[self.kind].required and role not in value_by_role:
                has = ", ".join(map(repr, list(row)[:6]))
                raise Unusable(f"{name!r} is null" if name in row else f"no field {name!r}; it has {has}")
        canonical, content = _READERS[self.kind](_Given(value_by_role, dict(self.columns)))
        return canonical, content if isinstance(content, str) else json.dumps(content, ensure_ascii=False, sort_keys=True)


def text_records(field: str) -> Records:
    """Return the schema of records whose text is in one column."""
    return Records("text", (("text", field),))


def recognise(rows: Sequence[Mapping[str, Any]], asked: str, named: Mapping[str, str], text_field: str, where: str) -> Records:
    """Detect the record kind of a source from the columns of its first rows.

    Args:
        asked: a kind, or `auto`.
        named: column names by role, from the recipe; they take precedence over the usual names.
        where: the recipe's field, for errors.

    Raises:
        DataError: two kinds or two columns match, a named column belongs to no kind or is
            absent, or one object wraps all records.
    """
    candidates = [asked] if asked != "auto" else [kind for kind in KINDS if set(named) <= set(KINDS[kind].columns)]
    if any(role not in KINDS[kind].columns for kind in candidates for role in named) or not candidates:
        allowed = "; ".join(f"{kind}: {', '.join(KINDS[kind].columns)}" for kind in (candidates or KINDS))
        raise DataError(
            "records of this kind have no such column",
            field=f"{where}.columns",
            got=", ".join(named),
            allowed=allowed,
        )
    columns = {name for row in rows for name in _present(row)}
    if rows and (absent := [name for name in named.values() if name not in columns]):
        raise DataError("no such column", field=f"{where}.columns", got=absent[0], allowed=", ".join(sorted(columns)))
    # The most frequent kind in a mixed file is the intended one; other records are broken.
    fitting_rows = {kind: [row for row in rows if _fits(kind, row, named, asked)] for kind in candidates if kind != "text"}
    max_num_rows = max(map(len, fitting_rows.values()), default=0)
    best_kinds = [
        kind for kind, matches in fitting_rows.items() if max_num_rows and len(matches) == max_num_rows
    ]
    if len(best_kinds) > 1:
        raise DataError(
            "the records match several kinds",
            field=f"{where}.records",
            got=f"columns {', '.join(sorted(columns))}",
            allowed=", ".join(best_kinds),
            remedy="Set `records` to one of them",
        )
    if not best_kinds and asked in ("auto", "text"):
        text = named.get("text", text_field)
        if text not in columns:
            _refuse_wrapped(rows, where)
        return text_records(text)
    kind = best_kinds[0] if best_kinds else asked
    present = {name for row in fitting_rows[kind] or rows for name in _present(row)}
    return Records(kind, _choose_columns(kind, present, named, where))


def _refuse_wrapped(rows: Sequence[Mapping[str, Any]], where: str) -> None:
    """Raise if the only row is an object that wraps all records, as in some exports."""
    for name, value in rows[0].items() if len(rows) == 1 else ():
        if isinstance(value, list) and value and all(isinstance(item, dict) for item in value):
            raise DataError(
                f"the file is one object with the records in its field {name!r}",
                field=f"{where}.path",
                got=f"{len(value)} objects in {name!r}",
                allowed="a JSON array of records, or one record per line",
                remedy="Save that list as a separate file",
            )


def _present(row: Mapping[str, Any]) -> set[str]:
    return {name for name, value in row.items() if value is not None}


def _fits(kind: str, row: Mapping[str, Any], named: Mapping[str, str], asked: str) -> bool:
    """Return True if a record has the columns of a kind (ShareGPT: `from`, not `role`)."""
    present = _present(row)

    def column(role: str) -> str | None:
        names = (named[role],) if role in named else KINDS[kind].columns[role]
        return next((name for name in names if name in present), None)

    if not all(column(role) for role in KINDS[kind].required):
        return False
    if kind not in ("messages", "sharegpt") or asked == kind:
        return True
    turns = row[column("messages") or ""]
    turn = turns[0] if isinstance(turns, list) and turns else None
    is_sharegpt = isinstance(turn, dict) and ROLE_KEYS[1] in turn and ROLE_KEYS[0] not in turn
    return is_sharegpt == (kind == "sharegpt")


def _choose_columns(kind: str, columns: set[str], named: Mapping[str, str], where: str) -> tuple[tuple[str, str], ...]:
    chosen = []
    for role, names in KINDS[kind].columns.items():
        candidates = [name for name in names if name in columns and name not in named.values()]
        if role in named:
            chosen.append((role, named[role]))
        elif len(candidates) > 1:
            raise DataError(
                f"two columns could be the {role}",
                field=f"{where}.columns",
                got=", ".join(candidates),
                remedy=f"Choose one: `columns: {{{role}: {candidates[0]}}}`",
            )
        elif candidates or role in KINDS[kind].required:
            chosen.append((role, candidates[0] if candidates else names[0]))
    return tuple(chosen)


class _Given(dict[str, Any]):
    """Values of a row by role; `names` maps roles to column names."""

    def __init__(self, values: Mapping[str, Any], names: Mapping[str, str]) -> None:
        super().__init__(values)
        self.names = names

    def string(self, role: str, *, optional: bool = False) -> str:
        """Return the text of a column; an `optional` column may be absent or empty."""
        value = self.get(role)
        name = self.names.get(role, role)
        if value is None and optional:
            return ""
        if not isinstance(value, str):
            raise Unusable(f"{name!r} is not a string but {type(value).__name__}")
        if not optional and (not value or value.isspace()):
            raise Unusable(f"{name!r} is empty")
        try:
            value.encode("utf-8")
        except UnicodeEncodeError as error:
            raise Unusable(f"{name!r} contains an unpaired surrogate") from error
        return value

    def integers(self, role: str) -> list[int]:
        """Return the list of integers in a column."""
        value = self[role]
        if not isinstance(value, list) or not all(isinstance(item, int) and not isinstance(item, bool) for item in value):
            raise Unusable(f"{self.names[role]!r} is not a list of integers")
        return value


def _read_text(row: _Given) -> tuple[str, Any]:
    return "text", row.string("text")


def _read_chat(row: _Given) -> tuple[str, Any]:
    return "chat", read_conversation(row["messages"], row.get("tools"), row.get("system"))


def _read_alpaca(row: _Given) -> tuple[str, Any]:
    instruction = row.string("instruction")
    output = row.string("output")
    input_text = row.string("input", optional=True)
    system = row.string("system", optional=True)
    prompt = f"{instruction}\n{input_text}" if input_text.strip() else instruction
    if row.get("history"):
        turns = []
        for exchange in row["history"]:
            if not isinstance(exchange, list) or len(exchange) != 2:
                raise Unusable("'history' is not a list of pairs")
            turns += [{"role": "user", "content": exchange[0]}, {"role": "assistant", "content": exchange[1]}]
        turns += [{"role": "user", "content": prompt}, {"role": "assistant", "content": output}]
        return "chat", read_conversation(turns, None, system)
    head = f"{system}\n\n" if system.strip() else ALPACA_PROMPT.format(ALPACA_INPUT if input_text.strip() else "")
    body = f"### Instruction:\n{instruction}\n\n" + (f"### Input:\n{input_text}\n\n" if input_text.strip() else "")
    return "pair", _pair(prompt, output, system, plain=f"{head}{body}### Response:\n")


def _read_prompt_response(row: _Given) -> tuple[str, Any]:
    prompt = row.string("prompt")
    response = row.string("response")
    system = row.string("system", optional=True)
    return "pair", _pair(prompt, response, system, plain=(f"{system}\n" if system.strip() else "") + f"{prompt}\n")


def _pair(prompt: str, response: str, system: str, *, plain: str) -> dict[str, str]:
    """Return a canonical pair; `plain` is the prompt text used without a chat template."""
    pair = {"prompt": prompt, "response": response, "plain": plain}
    return pair | ({"system": system} if system.strip() else {})


def _read_completion(row: _Given) -> tuple[str, Any]:
    prompt = row["prompt"]
    completion = row["completion"]
    if isinstance(prompt, list) and isinstance(completion, list):  # conversations in TRL's form
        unsupervised_prompt = [{**turn, "loss_weight": 0} if isinstance(turn, dict) else turn for turn in prompt]
        return "chat", read_conversation([*unsupervised_prompt, *completion], row.get("tools"))
    return "completion", {"prompt": row.string("prompt", optional=True), "completion": row.string("completion")}


def _read_preference(row: _Given) -> tuple[str, Any]:
    """Read a prompt with two responses, as strings or as turns (TRL's forms).

    The prompt of two whole conversations is the turns that they have in common.
    """
    responses = {name: row[name] for name in ("chosen", "rejected")}
    if all(isinstance(response, str) for response in responses.values()):
        if "prompt" not in row:
            raise Unusable("the responses have no prompt")
        if row.get("system"):
            raise Unusable("a system prompt needs responses as lists of turns, not as strings")
        return "preference", {name: {"prompt": row.string("prompt"), "completion": row.string(name)} for name in responses}
    if not all(isinstance(response, list) and response for response in responses.values()):
        raise Unusable("'chosen' and 'rejected' are neither two strings nor two lists of turns")
    chosen = responses["chosen"]
    rejected = responses["rejected"]
    prompt: Any = row.get("prompt", [])
    if isinstance(prompt, str):
        prompt = [{"role": "user", "content": prompt}]
    if not isinstance(prompt, list):
        raise Unusable("'prompt' is neither a string nor a list of turns")
    # Some files repeat the prompt in both responses. Without a prompt column, the prompt is the
    # turns that both have in common.
    common = next((number for number, (a, b) in enumerate(zip(chosen, rejected, strict=False)) if a != b), None)
    if common is None:
        raise Unusable("the chosen and the rejected response are the same")
    if prompt and chosen[: len(prompt)] == prompt:
        prompt = []
    unsupervised_prompt = [{**turn, "loss_weight": 0} if isinstance(turn, dict) else turn for turn in [*prompt, *chosen[:common]]]
    return "preference", {
        name: read_conversation(
            [*unsupervised_prompt, *response[common:]], row.get("tools"), row.get("system")
        )
        for name, response in responses.items()
    }


def _read_tokens(row: _Given) -> tuple[str, Any]:
    ids = row.integers("input_ids")
    if not ids:
        raise Unusable("the list of ids is empty")
    if min(ids) < 0 or max(ids) >= 2**32:
        raise Unusable("an id is negative or not below 2^32")
    supervised = [1] * len(ids)
    if "labels" in row:
        labels = row.integers("labels")
        if len(labels) != len(ids):
            raise Unusable(f"{len(ids)} ids and {len(labels)} labels")
        if any(label not in (IGNORED_LABEL, token) for label, token in zip(labels, ids, strict=True)):
            raise Unusable("a label must be -100 or the id at the same index, without a shift")
        supervised = [int(label != IGNORED_LABEL) for label in labels]
    if "mask" in row:
        mask = row.integers("mask")
        if len(mask) != len(ids) or not set(mask) <= {0, 1}:
            raise Unusable("the mask must have a 0 or 1 for each id")
        supervised = [a & b for a, b in zip(supervised, mask, strict=True)]
    return "tokens", {"ids": ids, "supervised": supervised}


def plain_texts(canonical: str, content: str) -> list[str]:
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
            for text in plain_texts("chat" if "messages" in response else "completion", json.dumps(response))
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

__all__ = ["KINDS", "RecordKind", "Records", "Unusable", "plain_texts", "recognise", "text_records"]
