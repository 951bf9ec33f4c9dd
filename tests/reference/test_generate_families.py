"""Greedy text of every kind of attention and rotation, token by token with a cache, equals that of
transformers.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from shardwright.architecture import read_config
from shardwright.inference.generation import SamplingSettings, complete_prompt
from shardwright.model.decoder import Decoder
from shardwright.model.hf.hf_weights import WeightsFolder
from tests.reference.cases import CASES, skip_unless_supported

PROMPT = "5 9 33 2 71 8 8 60 14 27"
NEW_TOKENS = 24
"""Enough to pass every window and the original positions of scaled rotations."""
SELECTED = [
    name
    for name in CASES
    if not name.startswith("llama-") or name in ("llama-yarn", "llama-llama3-newer", "llama-linear")
]


class NumberTokenizer:
    """Tokenizer whose text is the ids in decimal."""

    vocab_size = 97
    eos_id = None
    unknown_id = None
    prefix_ids = ()

    def encode(self, text: str) -> list[int]:
        return [int(word) for word in text.split()]

    def decode(self, ids: Iterable[int]) -> str:
        return "".join(f" {index}" for index in ids)


@pytest.mark.parametrize("case", SELECTED)
def test_greedy(tmp_path: Path, case: str) -> None:
    fields = dict(CASES[case])
    config = AutoConfig.for_model(fields.pop("model_type"), **fields)
    hf_model = AutoModelForCausalLM.from_config(
        config, dtype=torch.float32, experts_implementation="eager"
    ).eval()
    skip_unless_supported(hf_model, CASES[case])
    generator = torch.Generator().manual_seed(11)
    with torch.no_grad():
        for parameter in hf_model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.2)
    hf_model.save_pretrained(tmp_path)
    weights = WeightsFolder(tmp_path)
    shape = read_config(tmp_path)
    weights.check(shape)
    decoder = Decoder(shape)
    with torch.no_grad():
        for name, parameter in decoder.named_parameters():
            parameter.copy_(weights.read(name))
    ids = NumberTokenizer().encode(PROMPT)
    expected = hf_model.generate(
        torch.tensor([ids]),
        attention_mask=torch.ones(1, len(ids)),
        do_sample=False,
        # Older versions do not rotate cached keys again where longrope's long factors begin.
        use_cache=False,
        max_new_tokens=NEW_TOKENS,
        eos_token_id=None,
        pad_token_id=0,
    )
    completion = complete_prompt(
        decoder,
        NumberTokenizer(),
        PROMPT,
        SamplingSettings(temperature=0.0),
        max_new_tokens=NEW_TOKENS,
    )
    assert [*ids, *completion.new_ids] == expected[0].tolist()
    assert completion.text == NumberTokenizer().decode(completion.new_ids)
