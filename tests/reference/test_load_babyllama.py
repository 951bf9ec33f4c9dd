"""A real trained model (outside data): our reader, decoder and generation against those of
transformers.
"""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from shardwright.architecture import read_config
from shardwright.data.tokens.tokenizer_loading import load_tokenizer
from shardwright.errors import InputError, TokenizerError
from shardwright.inference.generation import SamplingSettings, complete_prompt, generate
from shardwright.model.decoder import Decoder
from shardwright.model.hf.hf_folder import write_hf_folder
from shardwright.model.hf.hf_weights import WeightsFolder

pytestmark = pytest.mark.data

STORY = (
    "Once upon a time, there was a little dog named Max. Max loved to play with his red ball in "
    "the park. One day, the ball rolled into the pond and Max was sad. A kind boy saw him and "
    "helped him to get it back. Max was happy again."
)


@pytest.fixture(scope="module")
def folder(outside_data: Path) -> Path:
    return outside_data / "models" / "babyllama105"


@pytest.fixture(scope="module")
def decoder(folder: Path) -> Decoder:
    shape = read_config(folder)
    weights = WeightsFolder(folder)
    weights.check(shape)
    built = Decoder(shape)
    with torch.no_grad():
        for name, parameter in built.named_parameters():
            parameter.copy_(weights.read(name, dtype=torch.float32))
    return built


@pytest.fixture(scope="module")
def hf_model(folder: Path) -> PreTrainedModel:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    assert isinstance(model, PreTrainedModel)
    return model


def compute_mean_loss(decoder: Decoder, ids: list[int]) -> float:
    row = torch.tensor([ids])
    with torch.no_grad():
        return float(decoder(row[:, :-1], labels_BT=row[:, 1:])) / (len(ids) - 1)


def assert_near(ours: torch.Tensor, expected: torch.Tensor) -> None:
    """Assert equality to 1e-5 of the largest logit; float32 sums differ in order."""
    assert (ours - expected).abs().max() <= 1e-5 * expected.abs().max()


def test_logits_and_loss(folder: Path, decoder: Decoder, hf_model: PreTrainedModel) -> None:
    ids = load_tokenizer(folder).encode(STORY)
    row = torch.tensor([ids])
    with torch.no_grad():
        reference = hf_model(row, labels=row)
        assert_near(decoder(row), reference.logits)
    assert compute_mean_loss(decoder, ids) == pytest.approx(float(reference.loss), abs=1e-5)


def test_the_model_predicts_stories(folder: Path, decoder: Decoder) -> None:
    """A broken load would give about ln(105) = 4.65; the model was trained on stories like this
    one, not on reversed ones.
    """
    tokenizer = load_tokenizer(folder)
    assert compute_mean_loss(decoder, tokenizer.encode(STORY)) < 1.0
    assert compute_mean_loss(decoder, tokenizer.encode(STORY[::-1])) > 3.0


def test_greedy_text_equals_that_of_transformers(
    folder: Path, decoder: Decoder, hf_model: PreTrainedModel
) -> None:
    tokenizer = load_tokenizer(folder)
    prompt = "Once upon a time"
    ids = tokenizer.encode(prompt)
    pieces: list[str] = []
    completion = complete_prompt(
        decoder,
        tokenizer,
        prompt,
        SamplingSettings(temperature=0.0),
        max_new_tokens=120,
        stop_ids={1, 2},
        on_text=pieces.append,
    )
    expected = hf_model.generate(
        torch.tensor([ids]), do_sample=False, max_new_tokens=120, pad_token_id=0
    )[0].tolist()
    assert [*ids, *completion.new_ids] == expected
    assert "".join(pieces) == completion.text
    assert completion.text.startswith(", there was a little")


def test_sampled_text_depends_on_the_seed_only(folder: Path, decoder: Decoder) -> None:
    tokenizer = load_tokenizer(folder)

    def text(seed: int) -> str:
        return generate(
            decoder,
            tokenizer,
            "Lily",
            max_new_tokens=40,
            temperature=1.0,
            top_k=30,
            top_p=0.95,
            seed=seed,
        )

    assert text(1) == text(1) != text(2)


def test_generation_ends_or_slides_at_the_last_position(folder: Path, decoder: Decoder) -> None:
    tokenizer = load_tokenizer(folder)
    greedy = SamplingSettings(temperature=0.0)
    stopped = complete_prompt(decoder, tokenizer, STORY, greedy, max_new_tokens=500)
    assert stopped.stop_reason == "positions"
    assert (
        len(stopped.prompt_ids) + len(stopped.new_ids) == decoder.shape.max_position_embeddings + 1
    )
    slid = complete_prompt(decoder, tokenizer, STORY, greedy, max_new_tokens=150, should_slide=True)
    assert slid.stop_reason == "length"
    assert slid.text.startswith(stopped.text)
    with pytest.raises(InputError, match=r"longer than the model's maximum length.*at most 256"):
        generate(decoder, tokenizer, STORY + STORY, max_new_tokens=1)


def test_unknown_characters_are_named(folder: Path, decoder: Decoder) -> None:
    with pytest.raises(TokenizerError, match=r"'∂', '漢'"):
        generate(decoder, load_tokenizer(folder), "漢 and ∂", max_new_tokens=1)


def test_an_export_keeps_the_logits(tmp_path: Path, folder: Path, decoder: Decoder) -> None:
    weights = WeightsFolder(folder)
    shape = read_config(folder)
    generation = json.loads((folder / "generation_config.json").read_text())
    write_hf_folder(
        tmp_path / "out",
        shape,
        lambda name: weights.read(name, dtype=torch.float32),
        dtype=torch.float32,
        tokenizer=load_tokenizer(folder),
        generation_config=generation,
    )
    reloaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    ids = load_tokenizer(tmp_path / "out").encode(STORY)
    with torch.no_grad():
        assert_near(decoder(torch.tensor([ids])), reloaded(torch.tensor([ids])).logits)
    assert reloaded.generation_config.eos_token_id == [1, 2]
    assert math.isclose(shape.num_parameters, sum(p.numel() for p in reloaded.parameters()))
