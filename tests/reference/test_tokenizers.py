"""Our saved tokenizers give the same ids in transformers' AutoTokenizer."""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers import AutoTokenizer

from shardwright.data.tokens.tokenizer import Tokenizer
from shardwright.data.tokens.tokenizer_loading import load_tokenizer, train_bpe, train_characters

TEXT = "def f(x):\n    return  x + 1  # größer\n\n\nclass A:\r\n\tpass\n"
EDGES = ["", " ", "\n", "  return", "x\n", "\n\n x", "größer", TEXT]


@pytest.fixture(params=["bpe", "character"])
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    return (
        train_bpe(iter([TEXT] * 3), 290)
        if request.param == "bpe"
        else train_characters(iter([TEXT]))
    )


def test_autotokenizer_gives_the_same_ids(tokenizer: Tokenizer, tmp_path: Path) -> None:
    tokenizer.save(tmp_path)
    hf_tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    for text in EDGES:
        ids = tokenizer.encode(text)
        assert hf_tokenizer(text)["input_ids"] == ids
        assert hf_tokenizer.decode(ids) == text == tokenizer.decode(ids)
    assert hf_tokenizer.eos_token_id == tokenizer.eos_id
    assert len(hf_tokenizer) == tokenizer.vocab_size


def test_a_folder_without_tokenizer_json_is_loaded_by_transformers(tmp_path: Path) -> None:
    (tmp_path / "vocab.txt").write_text(
        "\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "red", "fox", "##es"])
    )
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "BertTokenizer"}')
    tokenizer = load_tokenizer(tmp_path)
    hf_tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    assert (tokenizer.prefix_ids, tokenizer.suffix_ids, tokenizer.unknown_id) == ((2,), (3,), 1)
    assert [*tokenizer.encode("red foxes"), *tokenizer.suffix_ids] == hf_tokenizer("red foxes")[
        "input_ids"
    ]
    tokenizer.save(tmp_path / "saved")
    assert load_tokenizer(tmp_path / "saved").content_hash == tokenizer.content_hash


def test_real_folders_give_the_same_ids(outside_data: Path) -> None:
    folder = outside_data / "models" / "babyllama105"
    ours = load_tokenizer(folder)
    hf_tokenizer = AutoTokenizer.from_pretrained(folder)
    for text in ("Once upon a time", "two  spaces", "?"):
        assert ours.encode(text) == hf_tokenizer(text)["input_ids"]
