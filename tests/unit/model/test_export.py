"""Writing a Hugging Face folder: bytes, files, atomicity, refusals. That transformers loads it is
tests/reference's business.
"""

from __future__ import annotations

import errno
import json
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from shardwright.architecture import ParameterSpec, ZerosInit, read_config
from shardwright.architecture.families import MODEL_FAMILIES
from shardwright.errors import CheckFailed, InputError, RunFailed, WeightsError
from shardwright.model.hf_folder import (
    HF_CLASS_NAMES,
    list_exported_tensors,
    plan_shards,
    write_hf_folder,
)
from shardwright.model.hf_weights import INDEX_FILE_NAME, WEIGHTS_FILE_NAME, WeightsFolder
from shardwright.model.weight_init import initialise_parameter

CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 11,
    "hidden_size": 8,
    "intermediate_size": 12,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
    "torch_dtype": "float16",
    "_name_or_path": "somewhere/else",
}
SHAPE = read_config(CONFIG)
SPECS = {spec.name: spec for spec in SHAPE.list_parameters()}


def read(name: str) -> torch.Tensor:
    return initialise_parameter(SPECS[name], 0, dtype=torch.float32)


def tree(folder: Path) -> dict[str, bytes]:
    return {
        str(file.relative_to(folder)): file.read_bytes()
        for file in sorted(folder.rglob("*"))
        if file.is_file()
    }


class Ids:
    """A tokenizer as far as an export looks at one."""

    eos_id = 7
    prefix_ids = (5,)

    def save(self, folder: Path) -> None:
        (folder / "tokenizer.json").write_text("{}")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("max_shard_bytes", [1, 700, 1 << 30])
def test_written_tensors_read_back_bit_equal(
    tmp_path: Path, dtype: torch.dtype, max_shard_bytes: int
) -> None:
    """By the safetensors library and by our own reader, in one file or in many."""
    written = write_hf_folder(
        tmp_path / "out", SHAPE, read, dtype=dtype, max_shard_bytes=max_shard_bytes
    )
    stored: dict[str, torch.Tensor] = {}
    for file in written.weight_files:
        stored |= load_file(tmp_path / "out" / file)
    assert set(stored) == set(SPECS)
    weights = WeightsFolder(tmp_path / "out")
    weights.check(SHAPE)
    for name, tensor in stored.items():
        assert tensor.dtype == dtype
        assert torch.equal(tensor, read(name).to(dtype))
        assert torch.equal(weights.read(name, dtype=dtype), tensor)
    assert written.num_parameters == SHAPE.num_parameters
    assert written.weights_bytes == sum(tensor.nbytes for tensor in stored.values())


def test_same_bytes_as_the_library_writes(tmp_path: Path) -> None:
    """Our header says what safetensors' own writer says: metadata, order of names aside."""
    write_hf_folder(tmp_path / "out", SHAPE, read, dtype=torch.float32)
    save_file({name: read(name) for name in SPECS}, tmp_path / "theirs", metadata={"format": "pt"})

    def header(path: Path) -> dict[str, Any]:
        content = path.read_bytes()
        length = int.from_bytes(content[:8], "little")
        assert length % 8 == 0
        return dict(json.loads(content[8 : 8 + length]))

    ours = header(tmp_path / "out" / WEIGHTS_FILE_NAME)
    theirs = header(tmp_path / "theirs")
    assert ours.pop("__metadata__") == theirs.pop("__metadata__") == {"format": "pt"}
    assert {name: (entry["dtype"], entry["shape"]) for name, entry in ours.items()} == {
        name: (entry["dtype"], entry["shape"]) for name, entry in theirs.items()
    }


def test_index_covers_every_tensor(tmp_path: Path) -> None:
    out = tmp_path / "out"
    written = write_hf_folder(out, SHAPE, read, dtype=torch.float32, max_shard_bytes=1000)
    index = json.loads((out / INDEX_FILE_NAME).read_text())
    assert set(index["weight_map"]) == set(SPECS)
    assert set(index["weight_map"].values()) == set(written.weight_files)
    assert index["metadata"]["total_size"] == 4 * SHAPE.num_parameters
    count = len(written.weight_files)
    assert written.weight_files == tuple(
        f"model-{i + 1:05d}-of-{count:05d}.safetensors" for i in range(count)
    )
    for file in written.weight_files:
        tensors = load_file(out / file)
        assert sum(tensor.nbytes for tensor in tensors.values()) <= 1000 or len(tensors) == 1


def test_plan_shards_keeps_order_and_limit() -> None:
    specs = [
        ParameterSpec(str(i), (size,), "up", 0, ZerosInit())
        for i, size in enumerate([3, 3, 5, 20, 1, 1])
    ]
    tensors = list_exported_tensors(specs, torch.bfloat16)
    cut = [
        [tensor.piece.name for tensor in shard]
        for shard in plan_shards(tensors, max_shard_bytes=12)
    ]
    assert cut == [["0", "1"], ["2"], ["3"], ["4", "5"]]


def test_config_says_what_is_in_the_folder(tmp_path: Path) -> None:
    write_hf_folder(tmp_path / "out", SHAPE, read, dtype=torch.bfloat16)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert config["dtype"] == "bfloat16"
    assert not {"torch_dtype", "_name_or_path"} & set(config)
    assert read_config(config) == SHAPE


def test_special_ids_come_from_the_tokenizer_where_the_config_is_silent(tmp_path: Path) -> None:
    write_hf_folder(tmp_path / "silent", SHAPE, read, tokenizer=Ids())
    config = json.loads((tmp_path / "silent" / "config.json").read_text())
    assert (config["bos_token_id"], config["eos_token_id"], config["pad_token_id"]) == (5, 7, None)
    assert json.loads((tmp_path / "silent" / "generation_config.json").read_text()) == {
        "bos_token_id": 5,
        "eos_token_id": 7,
    }
    assert (tmp_path / "silent" / "tokenizer.json").exists()
    spoken = read_config(CONFIG | {"eos_token_id": [1, 2]})
    write_hf_folder(
        tmp_path / "spoken", spoken, read, tokenizer=Ids(), generation_config={"eos_token_id": 3}
    )
    assert json.loads((tmp_path / "spoken" / "config.json").read_text())["eos_token_id"] == [1, 2]
    assert json.loads((tmp_path / "spoken" / "generation_config.json").read_text()) == {
        "eos_token_id": 3
    }


def test_every_family_has_its_class() -> None:
    assert set(HF_CLASS_NAMES) == set(MODEL_FAMILIES)


def test_a_folder_that_holds_something_is_left_alone(tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    write_hf_folder(out, SHAPE, read)  # empty: fine
    (out / "notes.txt").write_text("mine")
    before = tree(out)
    with pytest.raises(InputError, match="the folder is not empty"):
        write_hf_folder(out, SHAPE, read)
    assert tree(out) == before
    write_hf_folder(out, SHAPE, read, overwrite=True)
    assert not (out / "notes.txt").exists()
    assert sorted(tmp_path.iterdir()) == [out]


def test_a_file_in_the_way(tmp_path: Path) -> None:
    (tmp_path / "out").write_text("")
    with pytest.raises(InputError, match="this is a file"):
        write_hf_folder(tmp_path / "out", SHAPE, read, overwrite=True)


def test_failure_half_way_leaves_the_old_folder_and_no_rubbish(tmp_path: Path) -> None:
    out = tmp_path / "out"
    write_hf_folder(out, SHAPE, read)
    before = tree(out)

    def full(name: str) -> torch.Tensor:
        if name == "model.norm.weight":
            raise OSError(errno.ENOSPC, "No space left on device")
        return read(name)

    with pytest.raises(RunFailed, match="No space left on device"):
        write_hf_folder(out, SHAPE, full, overwrite=True)
    assert tree(out) == before
    assert sorted(tmp_path.iterdir()) == [out]


def test_failure_of_the_last_move_brings_the_old_folder_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    write_hf_folder(out, SHAPE, read)
    before = tree(out)
    rename = Path.rename

    def failing(self: Path, target: Path) -> Path:
        if ".partial-" in self.name:
            raise OSError(errno.EIO, "Input/output error")
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", failing)
    with pytest.raises(RunFailed, match="Input/output error"):
        write_hf_folder(out, SHAPE, read, dtype=torch.float32, overwrite=True)
    assert tree(out) == before
    assert sorted(tmp_path.iterdir()) == [out]


def test_a_failed_check_leaves_nothing(tmp_path: Path) -> None:
    seen: list[set[str]] = []

    def refuse(folder: Path) -> None:
        seen.append({file.name for file in folder.iterdir()})
        raise CheckFailed("no")

    with pytest.raises(CheckFailed):
        write_hf_folder(tmp_path / "out", SHAPE, read, check=refuse)
    assert seen == [{WEIGHTS_FILE_NAME, "config.json", "generation_config.json"}]
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("value", "dtype", "told"),
    [
        (1e5, torch.float16, "too large"),
        (float("nan"), torch.float32, "not finite"),
        (float("inf"), torch.bfloat16, "not finite"),
    ],
)
def test_values_that_the_file_could_not_hold(
    tmp_path: Path, value: float, dtype: torch.dtype, told: str
) -> None:
    def broken(name: str) -> torch.Tensor:
        return read(name).fill_(value) if name == "model.norm.weight" else read(name)

    with pytest.raises(WeightsError, match=rf"model\.norm\.weight.*{told}"):
        write_hf_folder(tmp_path / "out", SHAPE, broken, dtype=dtype)
    assert not list(tmp_path.iterdir())


def test_wrong_shape_is_named(tmp_path: Path) -> None:
    with pytest.raises(WeightsError, match=r"lm_head\.weight.*got \[8, 11\]; allowed: \[11, 8\]"):
        write_hf_folder(
            tmp_path / "out",
            SHAPE,
            lambda name: read(name).T if name == "lm_head.weight" else read(name),
        )


def test_dtypes_that_no_model_is_stored_in(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="float32, bfloat16"):
        write_hf_folder(tmp_path / "out", SHAPE, read, dtype=torch.int8)


def test_tensors_are_written_one_at_a_time(tmp_path: Path) -> None:
    """Every tensor is gone before the next is asked for."""
    alive: weakref.WeakSet[torch.Tensor] = weakref.WeakSet()

    def watched(name: str) -> torch.Tensor:
        assert not alive, "an earlier tensor is still held"
        tensor = read(name)
        alive.add(tensor)
        return tensor

    write_hf_folder(tmp_path / "out", SHAPE, watched, dtype=torch.float32)
    write_hf_folder(tmp_path / "cast", SHAPE, watched, dtype=torch.bfloat16)
