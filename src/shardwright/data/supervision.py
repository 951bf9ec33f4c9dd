"""From a record to ids, and which of them are learnt.

Exact by construction: the ids of what stands before a supervised stretch are the first ids of the whole, just as a model meets
them when it is prompted. Where a token lies across the border, the record is set aside rather than supervised about right.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from shardwright.data.chat import ChatTemplate, Span
from shardwright.data.conversation import Unusable
from shardwright.data.tokenizer import IdArray, Tokenizer
from shardwright.errors import TokenizerError

Supervise = Literal["assistant", "last", "all"]
_SHOWN_CHARACTERS = 80


class Encoded(NamedTuple):
    """A document as ids with a 1 for each that is learnt; `num_characters` of the text that they stand for.

    Of a preference it is two documents, the chosen response's and, from id `border` on, the rejected one's. `weights`: what each
    id's loss weighs, where a turn says that it is neither 0 nor 1.
    """

    ids: IdArray
    supervised: npt.NDArray[np.uint8]
    num_characters: int
    border: int | None = None
    weights: npt.NDArray[np.float32] | None = None


class Prompted(NamedTuple):
    """What stands before the last response of a record, as ids, and that response as text."""

    prompt_ids: list[int]
    response: str


class Encoder:
    """Encodes records of every canonical form but plain text.

    Args:
        template: for conversations; None joins a pair line by line and refuses conversations.
        supervise: the assistant's turns, its last turn, or everything.
        max_characters: of a record; longer ones are set aside, but for given ids. None takes any.
    """

    def __init__(
        self, tokenizer: Tokenizer, template: ChatTemplate | None, supervise: Supervise, max_characters: int | None = None
    ) -> None:
        self._tokenizer = tokenizer
        self._max_characters = max_characters
        self._template = template
        self._supervise = supervise
        self._control_tokens = sorted(tokenizer.control_tokens, key=len, reverse=True)
        self._spelled = re.compile("|".join(map(re.escape, self._control_tokens)) or "(?!)")

    def encode(self, canonical: str, content: str) -> Encoded:
        """A record of `formats` as ids.

        Raises:
            Unusable: why the record is set aside.
            TokenizerError: what is wrong with template or tokenizer, whatever the record.
        """
        if self._max_characters is not None and len(content) > self._max_characters and canonical != "tokens":
            raise Unusable(f"{len(content):,} characters, where data.max_record_characters allows {self._max_characters:,}")
        record = json.loads(content)
        if canonical == "preference":
            return self._encode_preference(record)
        if canonical == "tokens":
            found = Encoded(np.array(record["ids"], dtype=np.uint32), np.array(record["supervised"], dtype=np.uint8), 0)
        elif canonical == "completion":
            found = self._encode_joined(record["prompt"], record["completion"])
        elif canonical == "pair" and self._template is None:
            found = self._encode_joined(record["plain"], record["response"])
        else:
            found = self._encode_chat(_as_messages(record), record.get("tools"))
        if not found.supervised[1:].any():
            raise Unusable("nothing in it is supervised")
        return found

    def _encode_preference(self, record: Mapping[str, Any]) -> Encoded:
        kind = "chat" if "messages" in record["chosen"] else "completion"
        chosen, rejected = (self.encode(kind, json.dumps(record[side])) for side in ("chosen", "rejected"))
        if np.array_equal(chosen.ids, rejected.ids):
            raise Unusable("the chosen and the rejected response are the same")
        if chosen.weights is not None or rejected.weights is not None:
            raise Unusable("a turn of a preference has a loss weight other than 0 and 1: a response is compared as a whole")
        return Encoded(
            np.concatenate([chosen.ids, rejected.ids]),
            np.concatenate([chosen.supervised, rejected.supervised]),
            chosen.num_characters + rejected.num_characters,
            border=len(chosen.ids),
        )

    def prompt(self, canonical: str, content: str) -> Prompted:
        """What a model is given to answer a record: the very ids that stand before the last response when it is trained.

        Raises:
            Unusable: the record is ids, or the template throws.
            TokenizerError: a conversation without a template.
        """
        record = json.loads(content)
        if canonical == "tokens":
            raise Unusable("ids have no response to compare with")
        if canonical == "preference":
            raise Unusable("a preference has two responses, of which neither is the answer")
        if canonical == "completion" or (canonical == "pair" and self._template is None):
            before, after = ("plain", "response") if canonical == "pair" else ("prompt", "completion")
            text, response = record[before], record[after]
            return Prompted([*self._tokenizer.prefix_ids, *self._tokenizer.encode_pieces([text])[0].tolist()], response)
        messages = _as_messages(record)
        self._refuse_control_tokens(messages, record.get("tools"))
        text = self._required_template().render(messages[:-1], record.get("tools"), prompt=True)
        return Prompted(self._tokenizer.encode_rendered([text])[0], messages[-1]["content"])

    def _required_template(self) -> ChatTemplate:
        if self._template is None:
            raise TokenizerError(
                "conversations need a chat template, and the tokenizer has none",
                field="data.chat_template",
                remedy="Name a file with a Jinja template there, or use the tokenizer of a chat model",
            )
        return self._template

    def _encode_joined(self, prompt: str, response: str) -> Encoded:
        """A prompt, a response and the end-of-text token."""
        tokenizer = self._tokenizer
        if not tokenizer.suffix_ids:
            raise TokenizerError(
                "the tokenizer has no end-of-text token: a model could not learn where a response ends",
                field="tokenizer",
                got=tokenizer.kind,
                remedy="Use a tokenizer with an eos_token; `kind: bpe` trains one",
            )
        if not prompt:
            before, whole = np.zeros(0, dtype=np.uint32), tokenizer.encode_pieces([response])[0]
        else:
            before, after, whole = tokenizer.encode_pieces([prompt, response, prompt + response])
            if not np.array_equal(whole[: len(before)], before):  # a token would lie across the border
                whole = np.concatenate([before, after])
        ids = [np.array(tokenizer.prefix_ids, dtype=np.uint32), whole, np.array(tokenizer.suffix_ids, dtype=np.uint32)]
        supervised = np.ones(sum(map(len, ids)), dtype=np.uint8)
        if self._supervise != "all":
            supervised[: len(tokenizer.prefix_ids) + len(before)] = 0
        return Encoded(np.concatenate(ids), supervised, len(prompt) + len(response))

    def _encode_chat(self, messages: Sequence[Mapping[str, Any]], tools: Any) -> Encoded:
        template = self._required_template()
        self._refuse_control_tokens(messages, tools)
        wanted = self._wanted_turns(messages)
        if not wanted:
            raise Unusable("nothing in it is supervised: every turn that would be has a loss weight of 0")
        text, spans = template.locate(messages, tools, wanted, self._control_tokens)
        spans = [self._with_end(text, span) for span in spans]
        for index, span in zip(wanted, spans, strict=True):
            self._check_turn(messages[index], index + 1, text[span.start : span.end])
        whole_turns = self._supervise == "all" and not any("loss_weight" in turn for turn in messages)
        if whole_turns:
            ids = self._tokenizer.encode_rendered([text])[0]
            return Encoded(np.array(ids, dtype=np.uint32), np.ones(len(ids), dtype=np.uint8), len(text))
        return self._encode_spans(text, spans, [messages[index].get("loss_weight", 1) for index in wanted])

    def _wanted_turns(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        """Indices of the turns that are learnt. Under `all` without weights it is the last turn, of which only the end is asked."""
        assistants = [index for index, turn in enumerate(messages) if turn["role"] == "assistant"]
        if self._supervise == "last":
            chosen = assistants[-1:]
        elif self._supervise == "all":
            weighted = any("loss_weight" in turn for turn in messages)
            chosen = list(range(len(messages))) if weighted else assistants[-1:]
        else:
            chosen = [index for index, turn in enumerate(messages) if index in assistants or turn.get("loss_weight", 0) > 0]
        return [index for index in chosen if messages[index].get("loss_weight") != 0]

    def _with_end(self, text: str, span: Span) -> Span:
        """The span with its end-of-turn token and without the white space that the template puts behind that."""
        own = text[span.start : span.end].rstrip()
        if any(own.endswith(token) for token in self._control_tokens):
            return Span(span.start, span.start + len(own))
        # A marker may end before the token. What ends the whole conversation ends a turn: nothing else follows there.
        everything = text.rstrip()
        ends = next((token for token in self._control_tokens if everything.endswith(token)), None)
        if ends is not None and text.startswith(ends, span.end):
            return Span(span.start, span.end + len(ends))
        raise TokenizerError(
            "no end-of-turn token follows a turn: a model could not learn where to stop",
            field="data.chat_template",
            got=f"a turn that ends {text[max(span.start, span.end - _SHOWN_CHARACTERS) : span.end]!r}",
            allowed=f"a special token of the tokenizer: {', '.join(self._control_tokens[:8]) or 'it has none'}",
            remedy="Let the template end turns with eos_token, or use the tokenizer that belongs to it",
        )

    def _check_turn(self, turn: Mapping[str, Any], number: int, text: str) -> None:
        """Reasoning that the template drops would be lost in silence, and what it writes behind a turn's end would be learnt."""
        squeezed = _squeeze(text)
        if _squeeze(turn.get("reasoning_content", "")) not in squeezed:
            raise Unusable(f"the chat template leaves out the reasoning of turn {number}")
        body = squeezed
        while token := next((token for token in self._control_tokens if body.endswith(_squeeze(token))), None):
            body = body.removesuffix(_squeeze(token))
        content = _squeeze(turn["content"])
        behind = body[body.rfind(content) + len(content) :] if content in body else ""
        if "tool_calls" not in turn and self._spelled.search(behind):
            raise TokenizerError(
                "the chat template writes more behind the end of a turn",
                field="data.chat_template",
                got=repr(text[-_SHOWN_CHARACTERS:]),
                remedy="Let it write the header of the next turn only `if add_generation_prompt`",
            )

    def _encode_spans(self, text: str, spans: Sequence[Span], loss_weights: Sequence[float]) -> Encoded:
        borders = sorted({place for span in spans for place in span} - {0})
        ids, count = self._count_before(text, borders)
        supervised = np.zeros(len(ids), dtype=np.uint8)
        for span in spans:
            supervised[count[span.start] : count[span.end]] = 1
        weights = None
        if any(weight != 1 for weight in loss_weights):
            weights = np.ones(len(ids), dtype=np.float32)
            for span, weight in zip(spans, loss_weights, strict=True):
                weights[count[span.start] : count[span.end]] = weight
        return Encoded(np.array(ids, dtype=np.uint32), supervised, len(text), weights=weights)

    def _count_before(self, text: str, borders: Sequence[int]) -> tuple[list[int], dict[int, int]]:
        """The ids of a text, and how many of them stand before each border.

        Where the ids of the stretches between the borders make up those of the whole, that is the answer, at the cost of
        encoding twice. Tokenizers that begin a text otherwise than they go on are asked for every text up to a border.
        """
        places = [0, *borders, len(text)]
        stretches = [text[a:b] for a, b in pairwise(places)]
        ids, *parts = self._tokenizer.encode_rendered([text, *stretches])
        lengths = list(accumulate(map(len, parts), initial=0))
        if lengths[-1] == len(ids) and ids == [token for part in parts for token in part]:
            return ids, dict(zip(places, lengths, strict=True))
        count = {0: 0}
        for border, part in zip(borders, self._tokenizer.encode_rendered([text[:border] for border in borders]), strict=True):
            if ids[: len(part)] != part:
                shown = f"{text[max(0, border - 20) : border]!r} and {text[border : border + 20]!r}"
                raise Unusable(f"a token lies across the border of a turn, between {shown}")
            count[border] = len(part)
        return ids, count

    def _refuse_control_tokens(self, messages: Sequence[Mapping[str, Any]], tools: Any) -> None:
        """Text that spells a control token would become one: a turn could end another, or speak as the system."""
        for number, turn in enumerate(messages, start=1):
            for text in (
                turn["content"],
                turn.get("reasoning_content", ""),
                json.dumps(turn.get("tool_calls", ""), ensure_ascii=False),
            ):
                if found := self._spelled.search(text):
                    raise Unusable(f"turn {number} spells the control token {found.group()!r}")
        if tools and (found := self._spelled.search(json.dumps(tools, ensure_ascii=False))):
            raise Unusable(f"the tools spell the control token {found.group()!r}")


def _as_messages(record: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    if "messages" in record:
        return list(record["messages"])
    system = [{"role": "system", "content": record["system"]}] if "system" in record else []
    pair = [{"role": "user", "content": record["prompt"]}, {"role": "assistant", "content": record["response"]}]
    return [*system, *pair]


def _squeeze(text: str) -> str:
    """Without white space, which templates trim and add."""
    return "".join(text.split())
