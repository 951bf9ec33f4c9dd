"""Text generation: one prompt, token by token, with cached keys and values.

Legend: B sequences (always one here), T tokens, V vocabulary.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from shardwright.data.tokens.tokenizer import Tokenizer
from shardwright.errors import InputError, TokenizerError
from shardwright.model.attention.kv_cache import KeyValueCache
from shardwright.model.decoder import Decoder

logger = logging.getLogger(__name__)

StopReason = Literal["eos", "length", "positions"]


@dataclass(frozen=True)
class SamplingSettings:
    """Settings for choosing the next token.

    `temperature` 0 takes the most likely token. Otherwise logits are divided by it; then only
    the `top_k` most likely tokens stay (None: all), and of those the smallest set whose
    probabilities reach `top_p`. `seed` makes the draw reproducible on any device.
    """

    temperature: float = 0.8
    top_k: int | None = None
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0.0 <= self.temperature < float("inf"):
            raise InputError(
                "wrong value",
                field="temperature",
                got=self.temperature,
                allowed="0 (most likely token) or above",
            )
        if self.top_k is not None and self.top_k < 1:
            raise InputError(
                "wrong value", field="top_k", got=self.top_k, allowed="1 or more, or none"
            )
        if not 0.0 < self.top_p <= 1.0:
            raise InputError(
                "wrong value", field="top_p", got=self.top_p, allowed="above 0, at most 1"
            )


@dataclass(frozen=True)
class Completion:
    """Text that a model added to a prompt, without the end token, and the reason to stop."""

    text: str
    prompt_ids: tuple[int, ...] = field(repr=False)
    new_ids: tuple[int, ...] = field(repr=False)
    stop_reason: StopReason


def generate(
    decoder: Decoder,
    tokenizer: Tokenizer,
    prompt: str,
    *,
    max_new_tokens: int = 200,
    temperature: float = 0.8,
    top_k: int | None = None,
    top_p: float = 1.0,
    seed: int = 0,
    stop_at_eos: bool = True,
    on_token: Callable[[str], None] | None = None,
) -> str:
    """Return the text that follows `prompt`; see `complete_prompt` and `SamplingSettings`."""
    stop_ids = {tokenizer.eos_id} - {None} if stop_at_eos else set()
    sampling = SamplingSettings(temperature, top_k, top_p, seed)
    return complete_prompt(
        decoder,
        tokenizer,
        prompt,
        sampling,
        max_new_tokens=max_new_tokens,
        stop_ids=stop_ids,
        on_text=on_token,
    ).text


@torch.inference_mode()
def complete_prompt(
    decoder: Decoder,
    tokenizer: Tokenizer,
    prompt: str | Sequence[int],
    sampling: SamplingSettings,
    *,
    max_new_tokens: int,
    stop_ids: Collection[int | None] = (),
    should_slide: bool = False,
    on_text: Callable[[str], None] | None = None,
) -> Completion:
    """Continue a prompt until a stop id, `max_new_tokens`, or the end of the model's positions.

    Args:
        prompt: Text, or ids that are used unchanged, such as those of a chat template.
        stop_ids: Ids that end the text and are not part of it.
        should_slide: At the end of the positions, drop the older half of the context and
            continue.
        on_text: Called with each piece of text when its characters are complete.

    Raises:
        InputError: The prompt is empty and the tokenizer has no eos token, or it is longer than
            the model's positions.
        TokenizerError: The prompt has ids outside the vocabulary, or unknown characters.
    """
    if max_new_tokens < 1:
        raise InputError(
            "wrong value", field="max_new_tokens", got=max_new_tokens, allowed="1 or more"
        )
    prompt_ids = encode_prompt(decoder, tokenizer, prompt)
    max_positions = decoder.shape.max_position_embeddings
    generator = torch.Generator().manual_seed(sampling.seed)
    context = _DecodingContext(
        decoder, prompt_ids, min(max_positions, len(prompt_ids) + max_new_tokens)
    )
    stream = _TextStream(tokenizer, prompt_ids, on_text)
    stopped: StopReason = "length"
    for _ in range(max_new_tokens):
        if len(context) > max_positions:
            if not should_slide:
                stopped = "positions"
                break
            context.truncate(max(1, max_positions // 2))
        logits_V = context.next_logits()[: tokenizer.vocab_size]  # without vocabulary padding
        token = sample_token(logits_V, sampling, generator)
        if token in stop_ids:
            stopped = "eos"
            break
        context.append(token)
        stream.append(token)
    return Completion(stream.finish(), tuple(prompt_ids), tuple(stream.ids), stopped)


def encode_prompt(decoder: Decoder, tokenizer: Tokenizer, prompt: str | Sequence[int]) -> list[int]:
    """Encode a prompt and check it against the model; an empty prompt becomes the eos id."""
    shape = decoder.shape
    ids = list(tokenizer.encode(prompt) if isinstance(prompt, str) else prompt)
    if not ids:
        if tokenizer.eos_id is None:
            raise InputError(
                "the prompt is empty, and the tokenizer has no eos token to begin a text with",
                field="prompt",
                remedy="Give at least one character",
            )
        ids = [tokenizer.eos_id]  # precedes every document of the training stream
    if isinstance(prompt, str) and tokenizer.unknown_id in ids[len(tokenizer.prefix_ids) :]:
        unknown = sorted(
            {
                character
                for character in prompt
                if tokenizer.unknown_id in tokenizer.encode(character)
            }
        )
        raise TokenizerError(
            "the tokenizer has no id for some characters of the prompt",
            field="prompt",
            got=", ".join(f"{character!r}" for character in unknown[:10]) or None,
            remedy="Remove them",
        )
    if max(ids) >= shape.vocab_size:
        raise TokenizerError(
            "the tokenizer does not match the model: an id is outside the vocabulary",
            field="tokenizer",
            got=max(ids),
            allowed=f"0 to {shape.vocab_size - 1}",
        )
    if len(ids) > shape.max_position_embeddings:
        raise InputError(
            "the prompt is longer than the model's maximum length",
            field="prompt",
            got=f"{len(ids)} tokens",
            allowed=f"at most {shape.max_position_embeddings}",
            remedy="Shorten it",
        )
    return ids


def sample_token(logits_V: Tensor, sampling: SamplingSettings, generator: torch.Generator) -> int:
    """Choose the next id; drawn on the CPU in float32, for the same result on all devices."""
    if sampling.temperature == 0.0:
        return int(logits_V.argmax())
    logits_V = logits_V.to("cpu", torch.float32) / sampling.temperature
    if sampling.top_k is not None and sampling.top_k < len(logits_V):
        threshold = torch.topk(logits_V, sampling.top_k).values[-1]
        logits_V = logits_V.masked_fill(logits_V < threshold, float("-inf"))
    probabilities_V = torch.softmax(logits_V, dim=-1)
    if sampling.top_p < 1.0:
        sorted_V, order_V = probabilities_V.sort(descending=True, stable=True)
        # Drop a token if those before it reach top_p; the first has none before it and stays.
        sorted_V[sorted_V.cumsum(0) - sorted_V >= sampling.top_p] = 0.0
        probabilities_V = torch.zeros_like(probabilities_V).scatter(0, order_V, sorted_V)
    return int(torch.multinomial(probabilities_V, 1, generator=generator))


class _DecodingContext:
    """Tokens so far, with the cached keys and values of the processed ones.

    longrope uses other factors for texts with more tokens than the original positions. The
    cache is therefore first allocated for the original positions only; a text that outgrows it is
    processed again with the long factors.
    """

    def __init__(self, decoder: Decoder, ids: Iterable[int], max_tokens: int) -> None:
        self._decoder = decoder
        self._ids = list(ids)
        originals = [
            rope.original_max_position_embeddings
            for rope in decoder.shape.ropes
            if rope.kind == "longrope"
        ]
        self._capacities = sorted(
            {max_tokens, *(original for original in originals if original < max_tokens)}
        )
        self._cache: KeyValueCache | None = None

    def __len__(self) -> int:
        return len(self._ids)

    def append(self, token: int) -> None:
        """Add a token; the model processes it in the next `next_logits`."""
        self._ids.append(token)

    def truncate(self, num_tokens: int) -> None:
        """Drop all but the newest tokens; their positions restart at 0."""
        self._ids = self._ids[-num_tokens:]
        self._cache = None

    def next_logits(self) -> Tensor:
        """Compute the logits of the token after the last, shape `[V]`."""
        decoder = self._decoder
        weight_VD = decoder.head_weight
        tensor = decoder.parallel_hooks.tensor
        dtype = decoder.compute_dtype or weight_VD.dtype
        if self._cache is None or len(self._ids) > self._cache.max_tokens:
            capacity = next(size for size in self._capacities if size >= len(self._ids))
            degree = 1 if tensor is None else tensor.degree
            self._cache = KeyValueCache(
                decoder.shape,
                1,
                capacity,
                dtype=dtype,
                device=weight_VD.device,
                tensor_degree=degree,
            )
        unread_BT = torch.tensor([self._ids[self._cache.num_tokens :]], device=weight_VD.device)
        last_BTD = decoder.compute_hidden(unread_BT, cache=self._cache)[:, -1:]
        return decoder.compute_output(last_BTD, None, cached=True)[0, -1]


class _TextStream:
    """Conversion of ids to complete pieces of text.

    A character may be split over tokens, and a word may lose its space. The text of a token is
    therefore the text of a window with it, minus the text of the window without it.
    """

    def __init__(
        self, tokenizer: Tokenizer, prompt_ids: list[int], on_text: Callable[[str], None] | None
    ) -> None:
        self.ids: list[int] = []
        self._tokenizer = tokenizer
        self._on_text = on_text
        self._window = list(prompt_ids)
        self._num_emitted = len(self._window)
        self._pieces: list[str] = []

    def append(self, token: int) -> None:
        """Add a token and emit the text that it completes."""
        self.ids.append(token)
        self._window.append(token)
        piece = self._decode_pending()
        if piece and not piece.endswith("\N{REPLACEMENT CHARACTER}"):
            self._emit(piece)

    def finish(self) -> str:
        """Return the whole text, including an incomplete last character."""
        self._emit(self._decode_pending())
        return "".join(self._pieces)

    def _decode_pending(self) -> str:
        emitted = self._tokenizer.decode(self._window[: self._num_emitted])
        return self._tokenizer.decode(self._window)[len(emitted) :]

    def _emit(self, piece: str) -> None:
        if piece:
            self._pieces.append(piece)
            self._window = self._window[self._num_emitted :]
            self._num_emitted = len(self._window)
            if self._on_text is not None:
                self._on_text(piece)
