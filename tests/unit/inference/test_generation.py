"""Generation: sampling, stopping, streaming, errors, and equality with and without the cache."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings

from shardwright.architecture import read_config
from shardwright.data.tokens.tokenizer import CharacterTokenizer
from shardwright.data.tokens.tokenizer_loading import train_bpe
from shardwright.errors import InputError, TokenizerError
from shardwright.inference.generation import (
    SamplingSettings,
    complete_prompt,
    generate,
    sample_token,
)
from shardwright.model.decoder import Decoder
from shardwright.model.parallel_hooks import NO_PARALLEL_HOOKS
from shardwright.model.weight_init import initialise_parameter

ALPHABET = "abcdefghij"
POSITIONS = 24
CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 10,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": POSITIONS,
    "initializer_range": 0.5,
}


def build(**fields: Any) -> Decoder:
    shape = read_config(CONFIG | fields)
    decoder = Decoder(shape)
    specs = {spec.name: spec for spec in shape.list_parameters()}
    with torch.no_grad():
        for name, parameter in decoder.named_parameters():
            parameter.copy_(initialise_parameter(specs[name], 4, dtype=torch.float32))
    return decoder


@pytest.fixture(scope="module")
def decoder() -> Decoder:
    return build()


@pytest.fixture(scope="module")
def tokenizer() -> CharacterTokenizer:
    return CharacterTokenizer(ALPHABET)


GREEDY = SamplingSettings(temperature=0.0)


def generate_without_cache(decoder: Decoder, ids: list[int], num_new: int) -> list[int]:
    """Decode greedily, with the whole text through the decoder for every token."""
    ids = list(ids)
    for _ in range(num_new):
        with torch.no_grad():
            ids.append(int(decoder(torch.tensor([ids]))[0, -1].argmax()))
    return ids


def test_the_cache_gives_equal_tokens_and_reads_each_token_once(
    decoder: Decoder, tokenizer: CharacterTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    num_tokens_read: list[int] = []
    hidden = Decoder.compute_hidden

    def count_tokens(self: Decoder, input_ids_BT: torch.Tensor, **options: Any) -> torch.Tensor:
        num_tokens_read.append(input_ids_BT.shape[1])
        return hidden(self, input_ids_BT, **options)

    expected = generate_without_cache(decoder, tokenizer.encode("abcde"), 12)
    monkeypatch.setattr(Decoder, "compute_hidden", count_tokens)
    completion = complete_prompt(decoder, tokenizer, "abcde", GREEDY, max_new_tokens=12)
    assert [*completion.prompt_ids, *completion.new_ids] == expected
    assert num_tokens_read == [5] + [1] * 11
    assert len(set(completion.new_ids)) > 2, "a model that repeats one token proves little"


def test_longrope_is_recomputed_beyond_the_original_positions(
    tokenizer: CharacterTokenizer,
) -> None:
    longrope = {"type": "longrope", "short_factor": [1.0, 1.5], "long_factor": [3.0, 9.0]}
    decoder = build(
        model_type="phi3",
        original_max_position_embeddings=8,
        rope_scaling=longrope,
        pad_token_id=None,
    )
    completion = complete_prompt(decoder, tokenizer, "abcde", GREEDY, max_new_tokens=12)
    assert [*completion.prompt_ids, *completion.new_ids] == generate_without_cache(
        decoder, tokenizer.encode("abcde"), 12
    )


def test_streamed_pieces_join_to_the_text(decoder: Decoder, tokenizer: CharacterTokenizer) -> None:
    pieces: list[str] = []
    text = generate(decoder, tokenizer, "abc", max_new_tokens=9, seed=2, on_token=pieces.append)
    assert pieces == list(text)
    assert len(text) == 9


class TestSampling:
    """Distribution of the sampled tokens."""

    logits = torch.tensor([2.0, 1.0, 0.0, -1.0, 1.5])

    def measure_shares(self, sampling: SamplingSettings, num_draws: int = 4000) -> torch.Tensor:
        generator = torch.Generator().manual_seed(sampling.seed)
        drawn = torch.tensor(
            [sample_token(self.logits, sampling, generator) for _ in range(num_draws)]
        )
        return torch.bincount(drawn, minlength=5) / num_draws

    def test_temperature_zero_takes_the_most_likely_token(self) -> None:
        assert sample_token(self.logits, GREEDY, torch.Generator()) == 0

    @pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
    def test_temperature(self, temperature: float) -> None:
        expected = torch.softmax(self.logits / temperature, 0)
        torch.testing.assert_close(
            self.measure_shares(SamplingSettings(temperature)), expected, atol=0.03, rtol=0
        )

    def test_top_k(self) -> None:
        expected = torch.softmax(
            self.logits.masked_fill(torch.tensor([False, True, True, True, False]), -torch.inf), 0
        )
        torch.testing.assert_close(
            self.measure_shares(SamplingSettings(1.0, top_k=2)), expected, atol=0.03, rtol=0
        )

    def test_top_p_selects_the_smallest_set_that_reaches_it(self) -> None:
        # Probabilities 0.457, 0.277, 0.168, 0.062, 0.023... in order of tokens 0, 4, 1, 2, 3.
        probabilities = torch.softmax(self.logits, 0)
        two = float(probabilities[0] + probabilities[4])
        assert set(
            self.measure_shares(SamplingSettings(1.0, top_p=two - 0.01))
            .nonzero()
            .flatten()
            .tolist()
        ) == {0, 4}
        assert set(
            self.measure_shares(SamplingSettings(1.0, top_p=two + 0.01))
            .nonzero()
            .flatten()
            .tolist()
        ) == {0, 1, 4}
        assert set(
            self.measure_shares(SamplingSettings(1.0, top_p=1e-6)).nonzero().flatten().tolist()
        ) == {0}

    def test_ties_at_the_limit_of_top_k_remain_a_distribution(self) -> None:
        logits = torch.zeros(6)
        assert (
            0
            <= sample_token(
                logits, SamplingSettings(1.0, top_k=2, top_p=0.5), torch.Generator().manual_seed(0)
            )
            < 6
        )

    @pytest.mark.parametrize(
        "wrong",
        [
            {"temperature": -1.0},
            {"temperature": float("nan")},
            {"top_k": 0},
            {"top_p": 0.0},
            {"top_p": 1.1},
        ],
    )
    def test_wrong_settings_are_refused(self, wrong: dict[str, Any]) -> None:
        with pytest.raises(InputError, match=next(iter(wrong))):
            SamplingSettings(**wrong)


def test_equal_seeds_give_equal_texts(decoder: Decoder, tokenizer: CharacterTokenizer) -> None:
    texts = [
        generate(decoder, tokenizer, "abc", max_new_tokens=15, temperature=2.0, seed=seed)
        for seed in (1, 1, 2)
    ]
    assert texts[0] == texts[1] != texts[2]


class WithEnd(CharacterTokenizer):
    """Tokenizer in which the character 'd' ends a text."""

    eos_id = 3


def test_generation_stops_at_the_end_of_text_and_omits_it(decoder: Decoder) -> None:
    tokenizer = WithEnd(ALPHABET)
    for seed in range(20):
        text = generate(decoder, tokenizer, "abc", max_new_tokens=20, temperature=2.0, seed=seed)
        whole = generate(
            decoder,
            tokenizer,
            "abc",
            max_new_tokens=20,
            temperature=2.0,
            seed=seed,
            stop_at_eos=False,
        )
        assert text == whole.split("d")[0]
    assert (
        complete_prompt(
            decoder, tokenizer, "abc", GREEDY, max_new_tokens=5, stop_ids=set(range(10))
        ).stop_reason
        == "eos"
    )


def test_an_empty_prompt_starts_like_a_document(
    decoder: Decoder, tokenizer: CharacterTokenizer
) -> None:
    completion = complete_prompt(decoder, WithEnd(ALPHABET), "", GREEDY, max_new_tokens=4)
    assert completion.prompt_ids == (3,)
    assert list(completion.new_ids) == generate_without_cache(decoder, [3], 4)[1:]
    with pytest.raises(InputError, match="the prompt is empty"):
        generate(decoder, tokenizer, "")


class TestPositions:
    """Behaviour at the end of the model's positions."""

    def test_generation_stops_at_the_last_position(
        self, decoder: Decoder, tokenizer: CharacterTokenizer
    ) -> None:
        completion = complete_prompt(decoder, tokenizer, "abcde", GREEDY, max_new_tokens=100)
        assert completion.stop_reason == "positions"
        # The token at the last position predicts one more, which needs no position itself.
        assert len(completion.prompt_ids) + len(completion.new_ids) == POSITIONS + 1

    def test_a_length_that_fits_exactly_stops_by_length(
        self, decoder: Decoder, tokenizer: CharacterTokenizer
    ) -> None:
        assert (
            complete_prompt(
                decoder, tokenizer, "abcde", GREEDY, max_new_tokens=POSITIONS + 1 - 5
            ).stop_reason
            == "length"
        )

    def test_sliding_recomputes_the_newest_half(
        self, decoder: Decoder, tokenizer: CharacterTokenizer
    ) -> None:
        completion = complete_prompt(
            decoder, tokenizer, "abcde", GREEDY, max_new_tokens=POSITIONS, should_slide=True
        )
        ids = generate_without_cache(decoder, tokenizer.encode("abcde"), POSITIONS + 1 - 5)
        rest = POSITIONS - (len(ids) - 5)
        continuation = generate_without_cache(decoder, ids[-(POSITIONS // 2) :], rest)
        assert list(completion.new_ids) == [*ids[5:], *continuation[-rest:]]
        assert completion.stop_reason == "length"

    def test_a_longer_prompt_is_refused(
        self, decoder: Decoder, tokenizer: CharacterTokenizer
    ) -> None:
        complete_prompt(decoder, tokenizer, "a" * POSITIONS, GREEDY, max_new_tokens=1)
        with pytest.raises(InputError, match=r"got 25 tokens; allowed: at most 24"):
            generate(decoder, tokenizer, "a" * (POSITIONS + 1))


def test_unknown_characters_are_refused(decoder: Decoder, tokenizer: CharacterTokenizer) -> None:
    class WithUnknown(CharacterTokenizer):
        unknown_id = 0

        def encode(self, text: str) -> list[int]:
            return [ALPHABET.index(character) if character in ALPHABET else 0 for character in text]

    with pytest.raises(TokenizerError, match=r"'!', 'é'"):
        generate(decoder, WithUnknown(ALPHABET), "bcé!")
    with pytest.raises(TokenizerError, match=r"U\+0021"):
        generate(decoder, tokenizer, "abc!")


def test_a_larger_tokenizer_is_refused_and_a_smaller_one_limits_the_output(
    decoder: Decoder,
) -> None:
    with pytest.raises(TokenizerError, match="got 10; allowed: 0 to 9"):
        generate(decoder, CharacterTokenizer(ALPHABET + "k"), "k")
    text = generate(decoder, CharacterTokenizer("abc"), "abc", max_new_tokens=20, temperature=100.0)
    assert set(text) <= set("abc")


def test_zero_new_tokens_are_refused(decoder: Decoder, tokenizer: CharacterTokenizer) -> None:
    with pytest.raises(InputError, match="max_new_tokens"):
        generate(decoder, tokenizer, "a", max_new_tokens=0)


@settings(max_examples=30, deadline=None)
@given(st.text(alphabet="aé漢🙂 \n", min_size=1, max_size=12))
def test_bytes_of_one_character_are_streamed_together(text: str) -> None:
    """A byte-level tokenizer splits characters; the stream joins them again."""
    tokenizer = train_bpe(iter(["aaaa aaaa"]), 258)
    ids = tokenizer.encode(text)
    pieces: list[str] = []
    scripted = Scripted(ids)
    completion = complete_prompt(
        scripted, tokenizer, "a", GREEDY, max_new_tokens=len(ids), on_text=pieces.append
    )  # type: ignore[arg-type]
    assert completion.text == "".join(pieces) == text
    assert all("\N{REPLACEMENT CHARACTER}" not in piece for piece in pieces)


class Scripted:
    """Decoder that outputs given ids for any input."""

    def __init__(self, ids: Iterable[int]) -> None:
        self._ids = iter(ids)
        self.shape = read_config(CONFIG | {"vocab_size": 300, "max_position_embeddings": 200})
        self.compute_dtype = None
        self.head_weight = torch.eye(300)

        self.parallel_hooks = NO_PARALLEL_HOOKS

    def compute_output(
        self, hidden_BTD: torch.Tensor, labels_BT: None, *, cached: bool
    ) -> torch.Tensor:
        return hidden_BTD

    def compute_hidden(self, input_ids_BT: torch.Tensor, cache: Any) -> torch.Tensor:
        cache.num_tokens += input_ids_BT.shape[1]
        return torch.nn.functional.one_hot(torch.tensor([[next(self._ids)]]), 300).float()
