"""Model sources: runs by checkpoint, Hugging Face folders, and errors for other paths."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from shardwright.architecture import read_config
from shardwright.checkpoint.boxes import Box
from shardwright.checkpoint.integrity import VerifiedCheckpoint
from shardwright.checkpoint.manifest import Manifest, StoredSlice, TensorEntry
from shardwright.checkpoint.tensor_loading import read_tensor
from shardwright.data.tokens.tokenizer import CharacterTokenizer
from shardwright.errors import CheckpointError, InputError, TokenizerError
from shardwright.inference.model_source import (
    load_decoder,
    open_model_source,
    parse_device,
    parse_dtype,
)
from shardwright.model.hf.hf_folder import write_hf_folder
from tests.unit.training.finished import ALPHABET, CONFIG, build_weights, make_run

SHAPE = read_config(CONFIG)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_run(tmp_path_factory.mktemp("runs") / "made").path


@pytest.mark.parametrize(("checkpoint", "step"), [("latest", 3), ("best", 2), ("1", 1)])
def test_a_run_opens_at_the_given_checkpoint(run: Path, checkpoint: str, step: int) -> None:
    source = open_model_source(run, checkpoint)
    assert (source.step, source.dtype, source.shape) == (step, torch.bfloat16, SHAPE)
    for name, tensor in build_weights(SHAPE, step).items():
        assert torch.equal(source.read(name), tensor)
    decoder = load_decoder(source, device=torch.device("cpu"), dtype=torch.float64)
    for name, parameter in decoder.named_parameters():
        assert torch.equal(parameter, source.read(name).double())
        assert not parameter.requires_grad
    assert source.load_tokenizer().encode("ja") == [9, 0]


@pytest.mark.parametrize("checkpoint", ["7", "newest", "-1", "", "\u00b2", "9" * 5000])
def test_an_unknown_checkpoint_is_refused(run: Path, checkpoint: str) -> None:
    with pytest.raises(CheckpointError, match="allowed: latest, best, 1, 2, 3"):
        open_model_source(run, checkpoint)


def test_a_run_without_the_given_checkpoint_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="has no checkpoint"):
        open_model_source(make_run(tmp_path / "none", steps=()).path)
    with pytest.raises(CheckpointError, match="no such checkpoint"):
        open_model_source(make_run(tmp_path / "worse", steps=(1,), best=None).path, "best")


def test_a_damaged_checkpoint_is_not_read(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", steps=(1,))
    file = next((folder.checkpoints / "step-00000001").glob("*.safetensors"))
    content = bytearray(file.read_bytes())
    content[-5] ^= 1
    file.write_bytes(content)
    with pytest.raises(CheckpointError, match="cannot be used"):
        open_model_source(folder.path, "1")


def test_a_config_that_does_not_match_the_checkpoint_is_refused(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", steps=(1,))
    folder.config_path.write_text(
        folder.config_path.read_text().replace('"intermediate_size": 24', '"intermediate_size": 25')
    )
    with pytest.raises(CheckpointError, match=r"do not match config\.json.*mlp"):
        open_model_source(folder.path)


def test_a_hugging_face_folder_opens(tmp_path: Path) -> None:
    weights = build_weights(SHAPE, 5)
    write_hf_folder(
        tmp_path / "hf",
        SHAPE,
        weights.__getitem__,
        dtype=torch.float16,
        tokenizer=CharacterTokenizer(ALPHABET),
        generation_config={"eos_token_id": [3, 4]},
    )
    source = open_model_source(tmp_path / "hf")
    assert (source.step, source.dtype) == (None, torch.float16)
    assert torch.equal(source.read("model.norm.weight"), weights["model.norm.weight"].half())
    assert source.stop_ids(source.load_tokenizer()) == {3, 4}
    with pytest.raises(InputError, match="has no checkpoints"):
        open_model_source(tmp_path / "hf", "best")


def test_a_folder_without_a_model_is_refused(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "nowhere"):
        with pytest.raises(InputError, match="no model in this folder"):
            open_model_source(path)


def test_adapters_without_a_base_are_refused(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(InputError, match=r"this folder has adapters but no model.*Name the run"):
        open_model_source(tmp_path)


def test_a_tokenizer_that_does_not_fit_the_model_is_refused(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", steps=(1,))
    shutil.rmtree(folder.tokenizer_path)
    CharacterTokenizer(ALPHABET + "k").save(folder.tokenizer_path)
    with pytest.raises(TokenizerError, match="got 11; allowed: at most 10"):
        open_model_source(folder.path).load_tokenizer()
    shutil.rmtree(folder.tokenizer_path)
    with pytest.raises(TokenizerError):
        open_model_source(folder.path).load_tokenizer()


def test_a_tensor_is_joined_from_its_slices(tmp_path: Path) -> None:
    """ZeRO-3 with tensor parallelism saves rows in two files and splits some of them by column."""
    whole = torch.randn(5, 4)
    boxes = {"top": Box((0, 0), (3, 4)), "left": Box((3, 0), (2, 1)), "right": Box((3, 1), (2, 3))}
    save_file({"top": whole[:3]}, tmp_path / "a.safetensors")
    save_file(
        {"left": whole[3:, :1].contiguous(), "right": whole[3:, 1:].contiguous()},
        tmp_path / "b.safetensors",
    )
    slices = tuple(
        StoredSlice("a.safetensors" if key == "top" else "b.safetensors", key, box)
        for key, box in boxes.items()
    )
    manifest = Manifest(
        step=1, world_size=2, files={}, tensors={"model.w": TensorEntry("F32", (5, 4), slices)}
    )
    assert torch.equal(read_tensor(VerifiedCheckpoint(tmp_path, manifest), "model.w"), whole)


def test_devices_and_dtypes_are_parsed() -> None:
    assert parse_device("cpu") == torch.device("cpu")
    assert parse_dtype("auto", torch.float16) == torch.float16
    assert parse_dtype("bf16", torch.float16) == torch.bfloat16
    for device in ("tpu", "meta", "cuda:99"):
        with pytest.raises(InputError, match="--device"):
            parse_device(device)
    with pytest.raises(InputError, match="--dtype"):
        parse_dtype("int4", torch.float16)
