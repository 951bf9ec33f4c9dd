"""Encoding of records as token ids with a mask of the supervised ones.

The mask is exact: the ids before a supervised span are a prefix of all ids, so training sees
the same ids as a prompt at inference. If a token crosses the boundary of a span, the record is
skipped.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from shardwright.data.records.chat_template import ChatTemplate, TurnSpan
from shardwright.data.records.conversation import UnusableRecord
from shardwright.data.tokens.tokenizer import IdArray, Tokenizer
from shardwright.errors import TokenizerError

SupervisedTurns = Literal["assistant", "last", "all"]
_MAX_SHOWN_CHARACTERS = 80


class EncodedRecord(NamedTuple):
    """Ids of a document and a mask with 1 for each supervised id.

    `num_characters` is the length of the encoded text. A preference is two documents: the chosen
    response's and, from id `second_document_start` on, the rejected one's. `weights` are the loss
    weights of the ids, None if all turns have weight 0 or 1.
    """

    ids: IdArray
    supervised_mask: npt.NDArray[np.uint8]
    num_characters: int
    second_document_start: int | None = None
    weights: npt.NDArray[np.float32] | None = None


class RecordPrompt(NamedTuple):
    """Prompt of a record's last response as ids, and that response as text."""

    prompt_ids: list[int]
    response: str


class RecordEncoder:
    """Encoder of records of every canonical form except plain text.

    Args:
        template: chat template; None encodes a pair as plain text and raises for conversations.
        supervise: the assistant's turns, its last turn, or everything.
        max_characters: maximum length of a record; longer ones are skipped, except token ids.
            None means no limit.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        template: ChatTemplate | None,
        supervise: SupervisedTurns,
        max_characters: int | None = None,
    ) -> None:
        self._tokenizer = tokenizer
        self._max_characters = max_characters
        self._template = template
        self._supervise = supervise
        self._control_tokens = sorted(tokenizer.control_tokens, key=len, reverse=True)
        self._control_token_pattern = re.compile(
            "|".join(map(re.escape, self._control_tokens)) or "(?!)"
        )

    def encode(self, canonical: str, content: str) -> EncodedRecord:
        """Encode a canonical record of `formats`.

        Raises:
            Unusable: the record is skipped; the message is the reason.
            TokenizerError: the template or the tokenizer is unsuitable for all records.
        """
        if (
            self._max_characters is not None
            and len(content) > self._max_characters
            and canonical != "tokens"
        ):
            raise UnusableRecord(
                f"{len(content):,} characters, but data.max_record_characters allows "
                f"{self._max_characters:,}"
            )
        record = json.loads(content)
        if canonical == "preference":
            return self._encode_preference(record)
        if canonical == "tokens":
            encoded = EncodedRecord(
                np.array(record["ids"], dtype=np.uint32),
                np.array(record["supervised"], dtype=np.uint8),
                0,
            )
        elif canonical == "completion":
            encoded = self._encode_joined(record["prompt"], record["completion"])
        elif canonical == "pair" and self._template is None:
            encoded = self._encode_joined(record["plain"], record["response"])
        else:
            encoded = self._encode_chat(_build_messages(record), record.get("tools"))
        if not encoded.supervised_mask[1:].any():
            raise UnusableRecord("nothing in it is supervised")
        return encoded

    def _encode_preference(self, record: Mapping[str, Any]) -> EncodedRecord:
        kind = "chat" if "messages" in record["chosen"] else "completion"
        chosen, rejected = (
            self.encode(kind, json.dumps(record[side])) for side in ("chosen", "rejected")
        )
        if np.array_equal(chosen.ids, rejected.ids):
            raise UnusableRecord("the chosen and the rejected response are the same")
        if chosen.weights is not None or rejected.weights is not None:
            raise UnusableRecord("a turn of a preference has a loss weight other than 0 and 1")
        return EncodedRecord(
            np.concatenate([chosen.ids, rejected.ids]),
            np.concatenate([chosen.supervised_mask, rejected.supervised_mask]),
            chosen.num_characters + rejected.num_characters,
            second_document_start=len(chosen.ids),
        )

    def build_prompt(self, canonical: str, content: str) -> RecordPrompt:
        """Return the prompt of a record: the ids that precede its last response in training.

        Raises:
            Unusable: the record is token ids or a preference, or the template raises an
                exception.
            TokenizerError: a conversation without a template.
        """
        record = json.loads(content)
        if canonical == "tokens":
            raise UnusableRecord("a record of token ids has no response text")
        if canonical == "preference":
            raise UnusableRecord("a preference has two responses instead of one")
        if canonical == "completion" or (canonical == "pair" and self._template is None):
            prompt_key, response_key = (
                ("plain", "response") if canonical == "pair" else ("prompt", "completion")
            )
            ids = self._tokenizer.encode_pieces([record[prompt_key]])[0].tolist()
            return RecordPrompt([*self._tokenizer.prefix_ids, *ids], record[response_key])
        messages = _build_messages(record)
        self._reject_control_tokens(messages, record.get("tools"))
        text = self._require_template().render(
            messages[:-1], record.get("tools"), has_generation_prompt=True
        )
        return RecordPrompt(self._tokenizer.encode_rendered([text])[0], messages[-1]["content"])

    def _require_template(self) -> ChatTemplate:
        if self._template is None:
            raise TokenizerError(
                "conversations need a chat template, but the tokenizer has none",
                field="data.chat_template",
                remedy="Set it to a file with a Jinja template, or use a chat model's tokenizer",
            )
        return self._template

    def _encode_joined(self, prompt: str, response: str) -> EncodedRecord:
        """Encode a prompt, a response and the end-of-text token."""
        tokenizer = self._tokenizer
        if not tokenizer.suffix_ids:
            raise TokenizerError(
                "the tokenizer has no end-of-text token, so a model cannot learn where to stop",
                field="tokenizer",
                got=tokenizer.kind,
                remedy="Use a tokenizer with an eos_token; `kind: bpe` trains one",
            )
        if not prompt:
            prompt_ids = np.zeros(0, dtype=np.uint32)
            text_ids = tokenizer.encode_pieces([response])[0]
        else:
            prompt_ids, response_ids, text_ids = tokenizer.encode_pieces(
                [prompt, response, prompt + response]
            )
            # If a token crosses the boundary, encode both parts separately.
            if not np.array_equal(text_ids[: len(prompt_ids)], prompt_ids):
                text_ids = np.concatenate([prompt_ids, response_ids])
        ids = [
            np.array(tokenizer.prefix_ids, dtype=np.uint32),
            text_ids,
            np.array(tokenizer.suffix_ids, dtype=np.uint32),
        ]
        supervised = np.ones(sum(map(len, ids)), dtype=np.uint8)
        if self._supervise != "all":
            supervised[: len(tokenizer.prefix_ids) + len(prompt_ids)] = 0
        return EncodedRecord(np.concatenate(ids), supervised, len(prompt) + len(response))

    def _encode_chat(self, messages: Sequence[Mapping[str, Any]], tools: Any) -> EncodedRecord:
        template = self._require_template()
        self._reject_control_tokens(messages, tools)
        turn_indices = self._select_supervised_turns(messages)
        if not turn_indices:
            raise UnusableRecord("nothing in it is supervised: the loss weights are 0")
        text, spans = template.locate_turns(messages, tools, turn_indices, self._control_tokens)
        spans = [self._extend_to_end_token(text, span) for span in spans]
        for index, span in zip(turn_indices, spans, strict=True):
            self._check_turn(messages[index], index + 1, text[span.start : span.end])
        supervise_everything = self._supervise == "all" and not any(
            "loss_weight" in turn for turn in messages
        )
        if supervise_everything:
            ids = self._tokenizer.encode_rendered([text])[0]
            return EncodedRecord(
                np.array(ids, dtype=np.uint32), np.ones(len(ids), dtype=np.uint8), len(text)
            )
        return self._encode_spans(
            text, spans, [messages[index].get("loss_weight", 1) for index in turn_indices]
        )

    def _select_supervised_turns(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        """Return the indices of the supervised turns.

        Under `all` without weights it is the assistant's last turn, which is only checked for
        its end.
        """
        assistants = [index for index, turn in enumerate(messages) if turn["role"] == "assistant"]
        if self._supervise == "last":
            chosen = assistants[-1:]
        elif self._supervise == "all":
            has_weights = any("loss_weight" in turn for turn in messages)
            chosen = list(range(len(messages))) if has_weights else assistants[-1:]
        else:
            chosen = [
                index
                for index, turn in enumerate(messages)
                if index in assistants or turn.get("loss_weight", 0) > 0
            ]
        return [index for index in chosen if messages[index].get("loss_weight") != 0]

    def _extend_to_end_token(self, text: str, span: TurnSpan) -> TurnSpan:
        """Extend the span to its end-of-turn token, without white space after the token."""
        turn_text = text[span.start : span.end].rstrip()
        if any(turn_text.endswith(token) for token in self._control_tokens):
            return TurnSpan(span.start, span.start + len(turn_text))
        # A marker may end before the token. The conversation's last token ends turns, too.
        conversation = text.rstrip()
        end_token = next(
            (token for token in self._control_tokens if conversation.endswith(token)), None
        )
        if end_token is not None and text.startswith(end_token, span.end):
            return TurnSpan(span.start, span.end + len(end_token))
        raise TokenizerError(
            "no end-of-turn token follows a turn, so a model cannot learn where to stop",
            field="data.chat_template",
            got="a turn that ends with "
            f"{text[max(span.start, span.end - _MAX_SHOWN_CHARACTERS) : span.end]!r}",
            allowed="a special token of the tokenizer: "
            f"{', '.join(self._control_tokens[:8]) or 'it has none'}",
            remedy="Make the template end turns with eos_token, or use its own tokenizer",
        )

    def _check_turn(self, turn: Mapping[str, Any], number: int, text: str) -> None:
        """Raise if the template drops the turn's reasoning or writes text after its end."""
        squeezed = _remove_whitespace(text)
        if _remove_whitespace(turn.get("reasoning_content", "")) not in squeezed:
            raise UnusableRecord(f"the chat template omits the reasoning of turn {number}")
        body = squeezed
        while token := next(
            (token for token in self._control_tokens if body.endswith(_remove_whitespace(token))),
            None,
        ):
            body = body.removesuffix(_remove_whitespace(token))
        content = _remove_whitespace(turn["content"])
        trailing = body[body.rfind(content) + len(content) :] if content in body else ""
        if "tool_calls" not in turn and self._control_token_pattern.search(trailing):
            raise TokenizerError(
                "the chat template writes more text after the end of a turn",
                field="data.chat_template",
                got=repr(text[-_MAX_SHOWN_CHARACTERS:]),
                remedy="Make it write the header of the next turn only `if add_generation_prompt`",
            )

    def _encode_spans(
        self, text: str, spans: Sequence[TurnSpan], loss_weights: Sequence[float]
    ) -> EncodedRecord:
        boundaries = sorted({position for span in spans for position in span} - {0})
        ids, num_ids_before = self._count_ids_before(text, boundaries)
        supervised = np.zeros(len(ids), dtype=np.uint8)
        for span in spans:
            supervised[num_ids_before[span.start] : num_ids_before[span.end]] = 1
        weights = None
        if any(weight != 1 for weight in loss_weights):
            weights = np.ones(len(ids), dtype=np.float32)
            for span, weight in zip(spans, loss_weights, strict=True):
                weights[num_ids_before[span.start] : num_ids_before[span.end]] = weight
        return EncodedRecord(np.array(ids, dtype=np.uint32), supervised, len(text), weights=weights)

    def _count_ids_before(
        self, text: str, borders: Sequence[int]
    ) -> tuple[list[int], dict[int, int]]:
        """Return the ids of a text, and the number of ids before each boundary.

        If the ids of the parts between the boundaries concatenate to the ids of the text, they
        give the answer for the cost of encoding twice. Otherwise (tokenizers that treat the
        start of a text specially) every prefix up to a boundary is encoded.
        """
        positions = [0, *borders, len(text)]
        parts_of_text = [text[a:b] for a, b in pairwise(positions)]
        ids, *parts = self._tokenizer.encode_rendered([text, *parts_of_text])
        lengths = list(accumulate(map(len, parts), initial=0))
        if lengths[-1] == len(ids) and ids == [token for part in parts for token in part]:
            return ids, dict(zip(positions, lengths, strict=True))
        num_ids_before = {0: 0}
        prefixes = self._tokenizer.encode_rendered([text[:boundary] for boundary in borders])
        for boundary, part in zip(borders, prefixes, strict=True):
            if ids[: len(part)] != part:
                before = text[max(0, boundary - 20) : boundary]
                after = text[boundary : boundary + 20]
                raise UnusableRecord(
                    f"a token crosses the boundary of a turn, between {before!r} and {after!r}"
                )
            num_ids_before[boundary] = len(part)
        return ids, num_ids_before

    def _reject_control_tokens(self, messages: Sequence[Mapping[str, Any]], tools: Any) -> None:
        """Raise for text that contains a control token: a turn could imitate another role."""
        for number, turn in enumerate(messages, start=1):
            for text in (
                turn["content"],
                turn.get("reasoning_content", ""),
                json.dumps(turn.get("tool_calls", ""), ensure_ascii=False),
            ):
                if match := self._control_token_pattern.search(text):
                    raise UnusableRecord(f"turn {number} contains the control token {match[0]!r}")
        if tools and (
            match := self._control_token_pattern.search(json.dumps(tools, ensure_ascii=False))
        ):
            raise UnusableRecord(f"the tools contain the control token {match[0]!r}")


def _build_messages(record: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    if "messages" in record:
        return list(record["messages"])
    system = [{"role": "system", "content": record["system"]}] if "system" in record else []
    pair = [
        {"role": "user", "content": record["prompt"]},
        {"role": "assistant", "content": record["response"]},
    ]
    return [*system, *pair]


def _remove_whitespace(text: str) -> str:
    """Remove white space, which templates trim and add."""
    return "".join(text.split())
