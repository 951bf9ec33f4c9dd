"""Chat template of a tokenizer: renders a conversation as text and locates each turn in it.

A turn is located exactly or not at all. A template with `{% generation %}` markers marks the
turns itself. With any other template the conversation is rendered up to the turn and through
the turn, and both texts must be prefixes of the whole conversation. A template that renders
earlier turns differently once later ones follow (for example one that drops old reasoning) is
an error.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from shardwright.data.records.conversation import UnusableRecord
from shardwright.errors import TokenizerError, explain_missing_path
from shardwright.files import read_text

_GENERATION_MARKER = re.compile(r"\{%-?\s*generation\s*-?%\}")
_RENDERING_VERSION = 1
"""Part of cache keys; increase it when a template would render the same conversation differently.
Since 1, tools and calls have the order of the file."""
_MAX_SHOWN_CHARACTERS = 160
_TOKEN_KEYS = (
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
)


class TurnSpan(NamedTuple):
    """Range of characters in a rendered conversation; `end` is exclusive."""

    start: int
    end: int


@dataclass(frozen=True)
class ChatTemplate:
    """Jinja template, with its variables besides the conversation (special tokens by name)."""

    text: str
    variables: Mapping[str, Any] = field(default_factory=dict)

    @property
    def has_generation_markers(self) -> bool:
        """True if the template marks the assistant's text with `{% generation %}`."""
        return _GENERATION_MARKER.search(self.text) is not None

    @property
    def cache_key(self) -> list[Any]:
        """Everything that the text of a conversation depends on besides the conversation."""
        return [self.text, dict(self.variables), _RENDERING_VERSION]

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Any = None,
        *,
        has_generation_prompt: bool = False,
    ) -> str:
        """Render the conversation; `has_generation_prompt` appends the header of the assistant's
        next turn.

        Raises:
            Unusable: the template raises an exception.
            TokenizerError: the template is not valid Jinja.
        """
        return self._render(
            messages, tools, has_generation_prompt=has_generation_prompt, has_turn_spans=False
        )[0]

    def _render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Any,
        *,
        has_generation_prompt: bool,
        has_turn_spans: bool,
    ) -> tuple[str, list[tuple[int, int]]]:
        from jinja2 import TemplateSyntaxError
        from transformers.utils.chat_template_utils import render_jinja_template

        turns = [
            {key: value for key, value in turn.items() if key != "loss_weight"} for turn in messages
        ]
        try:
            rendered: Any = render_jinja_template(
                conversations=[turns],
                tools=tools or None,
                chat_template=self.text,
                add_generation_prompt=has_generation_prompt,
                return_assistant_tokens_mask=has_turn_spans,
                **self.variables,
            )
        except TemplateSyntaxError as error:
            raise _build_template_error(self.text, error) from error
        except Exception as error:  # a template is third-party code and may raise anything
            raise UnusableRecord(
                f"the chat template raises {type(error).__name__}: {error}"
            ) from error
        texts, spans = rendered
        return texts[0], (spans[0] if has_turn_spans else [])

    def locate_turns(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Any,
        turn_indices: Sequence[int],
        control_tokens: Sequence[str],
    ) -> tuple[str, list[TurnSpan]]:
        """Return the rendered conversation and the spans of the turns with indices `turn_indices`.

        An assistant's turn begins after its header (the end of a generation prompt); any other
        turn begins with its header. A turn ends where the conversation up to it ends, or at the
        end of its marker.

        Args:
            control_tokens: some templates add one after the last turn only; it is not part of
                earlier turns.

        Raises:
            Unusable: the template raises an exception.
            TokenizerError: the turns cannot be located with this template.
        """
        assistant_indices = [
            index for index, turn in enumerate(messages) if turn["role"] == "assistant"
        ]
        use_markers = self.has_generation_markers and set(turn_indices) <= set(assistant_indices)
        conversation, marked_spans = self._render(
            messages, tools, has_generation_prompt=False, has_turn_spans=use_markers
        )
        if not use_markers:
            return conversation, [
                self._locate_turn(messages, tools, index, conversation, control_tokens)
                for index in turn_indices
            ]
        if len(marked_spans) != len(assistant_indices):
            raise TokenizerError(
                "the chat template needs one generation marker for each turn of the assistant",
                field="data.chat_template",
                got=f"{len(marked_spans)} markers for {len(assistant_indices)} turns in "
                f"{_shorten(conversation)}",
                remedy="Correct the template, or remove all its generation markers",
            )
        span_by_turn = dict(zip(assistant_indices, marked_spans, strict=True))
        return conversation, [TurnSpan(*span_by_turn[index]) for index in turn_indices]

    def _locate_turn(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Any,
        index: int,
        conversation_text: str,
        control_tokens: Sequence[str],
    ) -> TurnSpan:
        before = (
            self.render(
                messages[:index],
                tools,
                has_generation_prompt=messages[index]["role"] == "assistant",
            )
            if index
            else ""
        )
        through = (
            conversation_text
            if index == len(messages) - 1
            else self.render(messages[: index + 1], tools)
        )
        if not conversation_text.startswith(through):
            through = _strip_final_tokens(through, conversation_text, control_tokens)
        for part, extent in ((before, "before"), (through, "up to")):
            if not conversation_text.startswith(part):
                raise TokenizerError(
                    f"the chat template renders the conversation {extent} turn {index + 1} "
                    "differently when more turns follow, so the turn cannot be located",
                    field="data.chat_template",
                    got=_describe_difference(conversation_text, part),
                    remedy="Mark the assistant's text with {% generation %} in the template, "
                    "or set data.supervise: last",
                )
        if len(through) <= len(before):
            raise UnusableRecord(f"the chat template omits turn {index + 1}")
        return TurnSpan(len(before), len(through))


def _strip_final_tokens(prefix: str, conversation_text: str, control_tokens: Sequence[str]) -> str:
    """Strip control tokens from the end of `prefix` until it is a prefix of `conversation_text`."""
    shorter = prefix.rstrip()
    while token := next((token for token in control_tokens if shorter.endswith(token)), None):
        if conversation_text.startswith(shorter):
            return shorter
        shorter = shorter.removesuffix(token).rstrip()
    return prefix


def _describe_difference(conversation_text: str, part: str) -> str:
    position = next(
        (i for i, (a, b) in enumerate(zip(conversation_text, part, strict=False)) if a != b),
        min(len(conversation_text), len(part)),
    )
    first = max(0, position - _MAX_SHOWN_CHARACTERS // 2)
    last = position + _MAX_SHOWN_CHARACTERS // 2
    return f"{conversation_text[first:last]!r} where {part[first:last]!r} was expected"


def _shorten(text: str) -> str:
    half = _MAX_SHOWN_CHARACTERS // 2
    return repr(text if len(text) <= _MAX_SHOWN_CHARACTERS else f"{text[:half]} ... {text[-half:]}")


def load_chat_template(
    folder: Path | None,
    template_path: str | None,
    variables: Mapping[str, Any],
    eos_token: str | None,
) -> ChatTemplate | None:
    """Load the template from the file `template_path`, else from the tokenizer's folder, if it has
    one.

    Raises:
        TokenizerError: a file cannot be read, or there are several templates without a default.
    """
    if template_path is not None:
        text: str | None = _read_file(Path(template_path))
    else:
        text = None if folder is None else _find_template(folder)
    if text is None:
        return None
    tokens = _read_special_tokens(folder) if folder is not None else {}
    if eos_token is not None:
        tokens.setdefault("eos_token", eos_token)
    return ChatTemplate(text, {**tokens, **variables})


def _build_template_error(text: str, error: Any) -> TokenizerError:
    """Return the error for invalid Jinja, which affects all records."""
    line = "".join(text.splitlines()[error.lineno - 1 : error.lineno])
    return TokenizerError(
        f"the chat template is not valid Jinja: {error.message}",
        field="data.chat_template",
        got=f"line {error.lineno}: {line.strip()[:_MAX_SHOWN_CHARACTERS]}",
        remedy="Correct the template, or set data.chat_template to a file with another one",
    )


def _read_file(path: Path) -> str:
    try:
        return read_text(path)
    except (OSError, UnicodeDecodeError) as error:
        raise TokenizerError(
            f"the template cannot be read: {getattr(error, 'strerror', None) or error}",
            field="data.chat_template",
            got=str(path),
            remedy=f"{explain_missing_path(str(path))}Relative paths start at {Path.cwd()}",
        ) from error


def _find_template(folder: Path) -> str | None:
    """Return the template in chat_template.jinja, else that in tokenizer_config.json."""
    if (folder / "chat_template.jinja").is_file():
        return _read_file(folder / "chat_template.jinja")
    template = _read_json(folder / "tokenizer_config.json").get("chat_template")
    if isinstance(template, list):
        by_name = {
            str(entry.get("name")): entry.get("template")
            for entry in template
            if isinstance(entry, dict)
        }
        if not isinstance(by_name.get("default"), str):
            raise TokenizerError(
                "the tokenizer has several chat templates and none is named `default`",
                field="data.chat_template",
                got=", ".join(by_name),
                remedy="Save one of them to a file and set data.chat_template to its path",
            )
        template = by_name["default"]
    return template if isinstance(template, str) and template else None


def _read_special_tokens(folder: Path) -> dict[str, Any]:
    """Read special tokens by name; tokenizer_config.json overrides special_tokens_map.json."""
    special_tokens: dict[str, Any] = {}
    for name in ("special_tokens_map.json", "tokenizer_config.json"):
        content = _read_json(folder / name)
        for key in _TOKEN_KEYS:
            token = content.get(key)
            if isinstance(token, dict):
                token = token.get("content")
            if isinstance(token, str) and token:
                special_tokens[key] = token
    return special_tokens


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        content = json.loads(read_text(path))
    except (OSError, ValueError, RecursionError) as error:
        raise TokenizerError(f"cannot be read: {error}", field=str(path)) from error
    return content if isinstance(content, dict) else {}
