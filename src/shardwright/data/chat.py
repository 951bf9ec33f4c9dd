"""The tokenizer's chat template: a conversation as one text, and which stretch of it each turn is.

Where a turn lies is found exactly or not at all. A template with `{% generation %}` markers says it itself. For any other the
conversation is rendered up to the turn and through the turn, and both texts must be what the whole begins with; a template that
writes earlier turns otherwise once later ones follow (one that drops old reasoning, for example) is refused with the sample.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from shardwright.data.conversation import Unusable
from shardwright.errors import TokenizerError
from shardwright.files import read_text

_MARKER = re.compile(r"\{%-?\s*generation\s*-?%\}")
_SHOWN_CHARACTERS = 160
_TOKEN_KEYS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class Span(NamedTuple):
    """Characters `start` to `end` of a rendered conversation."""

    start: int
    end: int


@dataclass(frozen=True)
class ChatTemplate:
    """A Jinja template with what it is given besides the conversation. `variables` hold the special tokens by their names."""

    text: str
    variables: Mapping[str, Any] = field(default_factory=dict)

    @property
    def has_markers(self) -> bool:
        """Whether the template marks what the assistant generates."""
        return _MARKER.search(self.text) is not None

    def render(self, messages: Sequence[Mapping[str, Any]], tools: Any = None, *, prompt: bool = False) -> str:
        """The conversation as text; with `prompt` the header of the assistant's next turn behind it.

        Raises:
            Unusable: the template throws.
            TokenizerError: it is no template.
        """
        return self._render(messages, tools, prompt=prompt, marks=False)[0]

    def _render(
        self, messages: Sequence[Mapping[str, Any]], tools: Any, *, prompt: bool, marks: bool
    ) -> tuple[str, list[tuple[int, int]]]:
        from jinja2 import TemplateSyntaxError
        from transformers.utils.chat_template_utils import render_jinja_template

        turns = [{key: value for key, value in turn.items() if key != "loss_weight"} for turn in messages]
        try:
            rendered: Any = render_jinja_template(
                conversations=[turns],
                tools=tools or None,
                chat_template=self.text,
                add_generation_prompt=prompt,
                return_assistant_tokens_mask=marks,
                **self.variables,
            )
        except TemplateSyntaxError as error:
            raise _no_template(self.text, error) from error
        except Exception as error:  # the template is a program that somebody else wrote
            raise Unusable(f"the chat template throws: {type(error).__name__}: {error}") from error
        texts, spans = rendered
        return texts[0], (spans[0] if marks else [])

    def locate(
        self, messages: Sequence[Mapping[str, Any]], tools: Any, wanted: Sequence[int], control_tokens: Sequence[str]
    ) -> tuple[str, list[Span]]:
        """The rendered conversation, and where the turns of the indices `wanted` lie in it.

        An assistant's turn begins behind the header that a prompt for it ends with; any other begins with its header. It ends
        where the conversation up to it ends, or its marker does.

        Args:
            control_tokens: some templates write one more of them behind the last turn only; it is no part of earlier turns.

        Raises:
            Unusable: the template throws.
            TokenizerError: the template gives no way to tell where a turn lies.
        """
        assistants = [index for index, turn in enumerate(messages) if turn["role"] == "assistant"]
        marked = self.has_markers and set(wanted) <= set(assistants)
        whole, marks = self._render(messages, tools, prompt=False, marks=marked)
        if not marked:
            return whole, [self._locate_turn(messages, tools, index, whole, control_tokens) for index in wanted]
        if len(marks) != len(assistants):
            raise TokenizerError(
                "the chat template's generation markers are not one for each turn of the assistant",
                field="data.chat_template",
                got=f"{len(marks)} markers for {len(assistants)} turns in {_shorten(whole)}",
                remedy="Mend the template, or take the markers out: turns are then found by rendering",
            )
        by_turn = dict(zip(assistants, marks, strict=True))
        return whole, [Span(*by_turn[index]) for index in wanted]

    def _locate_turn(
        self, messages: Sequence[Mapping[str, Any]], tools: Any, index: int, whole: str, control_tokens: Sequence[str]
    ) -> Span:
        before = self.render(messages[:index], tools, prompt=messages[index]["role"] == "assistant") if index else ""
        through = whole if index == len(messages) - 1 else self.render(messages[: index + 1], tools)
        if not whole.startswith(through):
            through = _without_final_tokens(through, whole, control_tokens)
        for part, what in ((before, "before"), (through, "up to")):
            if not whole.startswith(part):
                raise TokenizerError(
                    f"the chat template writes the conversation {what} turn {index + 1} otherwise once that is followed by more, "
                    "so the turn cannot be found in it",
                    field="data.chat_template",
                    got=_difference(whole, part),
                    remedy="Mark the assistant's text with {% generation %} in the template, or set data.supervise: last",
                )
        if len(through) <= len(before):
            raise Unusable(f"the chat template leaves turn {index + 1} out")
        return Span(len(before), len(through))


def _without_final_tokens(through: str, whole: str, control_tokens: Sequence[str]) -> str:
    """`through` less the control tokens at its end that `whole` does not go on with, as long as one remains."""
    shorter = through.rstrip()
    while token := next((token for token in control_tokens if shorter.endswith(token)), None):
        if whole.startswith(shorter):
            return shorter
        shorter = shorter.removesuffix(token).rstrip()
    return through


def _difference(whole: str, part: str) -> str:
    at = next((i for i, (a, b) in enumerate(zip(whole, part, strict=False)) if a != b), min(len(whole), len(part)))
    first = max(0, at - _SHOWN_CHARACTERS // 2)
    last = at + _SHOWN_CHARACTERS // 2
    return f"{whole[first:last]!r} where {part[first:last]!r} was expected"


def _shorten(text: str) -> str:
    half = _SHOWN_CHARACTERS // 2
    return repr(text if len(text) <= _SHOWN_CHARACTERS else f"{text[:half]} ... {text[-half:]}")


def load_chat_template(
    folder: Path | None, given: str | None, variables: Mapping[str, Any], eos_token: str | None
) -> ChatTemplate | None:
    """The template of the file `given`, else of the tokenizer's folder; None where there is none.

    Raises:
        TokenizerError: a file that cannot be read, or several templates of which none is the default.
    """
    if given is not None:
        text: str | None = _read_file(Path(os.path.expanduser(given)))
    else:
        text = None if folder is None else _find_template(folder)
    if text is None:
        return None
    tokens = _special_tokens(folder) if folder is not None else {}
    if eos_token is not None:
        tokens.setdefault("eos_token", eos_token)
    return ChatTemplate(text, {**tokens, **variables})


def _no_template(text: str, error: Any) -> TokenizerError:
    """What no record can be rendered with; what only some records make a template say is theirs."""
    line = "".join(text.splitlines()[error.lineno - 1 : error.lineno])
    return TokenizerError(
        f"the chat template is no Jinja: {error.message}",
        field="data.chat_template",
        got=f"line {error.lineno}: {line.strip()[:_SHOWN_CHARACTERS]}",
        remedy="Mend it, or name a file with another template there",
    )


def _read_file(path: Path) -> str:
    try:
        return read_text(path)
    except (OSError, UnicodeDecodeError) as error:
        raise TokenizerError(f"the chat template cannot be read: {error}", field="data.chat_template", got=str(path)) from error


def _find_template(folder: Path) -> str | None:
    """The template where transformers keeps it: a file of its own, before the tokenizer's configuration."""
    if (folder / "chat_template.jinja").is_file():
        return _read_file(folder / "chat_template.jinja")
    found = _read_json(folder / "tokenizer_config.json").get("chat_template")
    if isinstance(found, list):
        by_name = {str(entry.get("name")): entry.get("template") for entry in found if isinstance(entry, dict)}
        if not isinstance(by_name.get("default"), str):
            raise TokenizerError(
                "the tokenizer has several chat templates, none of them the default",
                field="data.chat_template",
                got=", ".join(by_name),
                remedy="Write one into a file and name it",
            )
        found = by_name["default"]
    return found if isinstance(found, str) and found else None


def _special_tokens(folder: Path) -> dict[str, Any]:
    """Special tokens by name, as the tokenizer's folder has them: the configuration before the older map."""
    found: dict[str, Any] = {}
    for name in ("special_tokens_map.json", "tokenizer_config.json"):
        content = _read_json(folder / name)
        for key in _TOKEN_KEYS:
            token = content.get(key)
            if isinstance(token, dict):
                token = token.get("content")
            if isinstance(token, str) and token:
                found[key] = token
    return found


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        content = json.loads(read_text(path))
    except (OSError, ValueError, RecursionError) as error:
        raise TokenizerError(f"cannot be read: {error}", field=str(path)) from error
    return content if isinstance(content, dict) else {}
