"""Reading of weights folders: accepted and refused files; a slice reads only its bytes."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from safetensors.torch import save_file

from shardwright.architecture import ModelShape, read_config
from shardwright.errors import WeightsError
from shardwright.model.hf.hf_weights import INDEX_FILE_NAME, WEIGHTS_FILE_NAME, WeightsFolder

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 11,
    "hidden_size": 8,
    "intermediate_size": 12,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
}
TIED = LLAMA | {"tie_word_embeddings": True}
HEAD = "lm_head.weight"
EMBEDDING = "model.embed_tokens.weight"

Tensors = dict[str, torch.Tensor]


def random_tensors(shape: ModelShape, dtype: torch.dtype = torch.float32) -> Tensors:
    generator = torch.Generator().manual_seed(0)
    return {
        spec.name: torch.randn(spec.shape, generator=generator).to(dtype)
        for spec in shape.list_parameters()
    }


def write_one(folder: Path, tensors: Tensors) -> Path:
    folder.mkdir(exist_ok=True)
    save_file(tensors, folder / WEIGHTS_FILE_NAME)
    return folder


def write_many(folder: Path, tensors: Tensors, num_files: int = 3) -> Path:
    folder.mkdir(exist_ok=True)
    names = sorted(tensors)
    weight_map = {name: f"part-{i % num_files}.safetensors" for i, name in enumerate(names)}
    for file in set(weight_map.values()):
        save_file(
            {name: tensors[name] for name in names if weight_map[name] == file}, folder / file
        )
    (folder / INDEX_FILE_NAME).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return folder


def open_folder(folder: Path, shape: ModelShape) -> WeightsFolder:
    weights = WeightsFolder(folder)
    weights.check(shape)
    return weights


@pytest.mark.parametrize("write", [write_one, write_many])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_reads_every_tensor(tmp_path: Path, write: Any, dtype: torch.dtype) -> None:
    shape = read_config(LLAMA)
    tensors = random_tensors(shape, dtype)
    weights = open_folder(write(tmp_path, tensors), shape)
    for name, tensor in tensors.items():
        assert torch.equal(weights.read(name, dtype=torch.float32), tensor.float())
        assert torch.equal(weights.read(name, dtype=dtype), tensor)


@settings(
    max_examples=40,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(st.data())
def test_reads_any_slice(tmp_path: Path, data: st.DataObject) -> None:
    shape = read_config(LLAMA)
    tensors = random_tensors(shape)
    name = data.draw(st.sampled_from(sorted(tensors)))
    expected = tensors[name]
    narrow = []
    for dim, size in enumerate(expected.shape):
        start = data.draw(st.integers(0, size))
        part = data.draw(st.sampled_from([None, (start, data.draw(st.integers(0, size - start)))]))
        narrow.append(part)
        expected = expected if part is None else expected.narrow(dim, *part)
    if not (tmp_path / WEIGHTS_FILE_NAME).exists():
        write_one(tmp_path, tensors)
    read = open_folder(tmp_path, shape).read(name, narrow=narrow, dtype=torch.float64)
    assert read.dtype == torch.float64
    assert torch.equal(read, expected.double())


def test_a_slice_of_a_large_file_reads_only_its_bytes(tmp_path: Path) -> None:
    """The file has 8 GiB of zeros but is sparse; reading all of it would fail or take minutes."""
    rows = 1 << 18
    columns = 1 << 14
    header = json.dumps(
        {"w": {"dtype": "BF16", "shape": [rows, columns], "data_offsets": [0, 2 * rows * columns]}}
    ).encode()
    with (tmp_path / WEIGHTS_FILE_NAME).open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(8 + len(header) + 2 * rows * columns)
    part = WeightsFolder(tmp_path).read("w", narrow=[(rows - 4, 4), None], dtype=torch.float32)
    assert part.shape == (4, columns)
    assert part.count_nonzero() == 0


def test_every_fault_is_listed_in_one_error(tmp_path: Path) -> None:
    shape = read_config(LLAMA)
    tensors = random_tensors(shape)
    del tensors["model.norm.weight"], tensors["model.layers.1.mlp.up_proj.weight"]
    tensors["model.layers.0.self_attn.q_proj.weight"] = torch.zeros(8, 9)
    tensors["model.layers.0.self_attn.k_proj.weight"] = torch.zeros(4, 8, dtype=torch.int8)
    tensors["model.layers.2.mlp.up_proj.weight"] = torch.zeros(12, 8)
    with pytest.raises(WeightsError) as caught:
        open_folder(write_one(tmp_path, tensors), shape)
    message = str(caught.value)
    assert "2 missing: model.layers.1.mlp.up_proj.weight [12, 8], model.norm.weight [8]" in message
    assert "1 surplus: model.layers.2.mlp.up_proj.weight [12, 8]" in message
    assert "model.layers.0.self_attn.q_proj.weight is [8, 9], the model expects [8, 8]" in message
    assert "model.layers.0.self_attn.k_proj.weight is stored as I8" in message


def test_transposed_and_flattened_tensors_are_misshapen(tmp_path: Path) -> None:
    shape = read_config(LLAMA)
    tensors = random_tensors(shape)
    tensors["model.layers.0.mlp.up_proj.weight"] = tensors[
        "model.layers.0.mlp.up_proj.weight"
    ].T.contiguous()
    tensors["model.layers.1.mlp.up_proj.weight"] = tensors[
        "model.layers.1.mlp.up_proj.weight"
    ].flatten()
    with pytest.raises(WeightsError, match=r"2 wrong.*\[8, 12\].*\[96\]"):
        open_folder(write_one(tmp_path, tensors), shape)


class TestTiedEmbeddings:
    """With `tie_word_embeddings: true` the head may be absent, equal, or stored alone."""

    shape = read_config(TIED)

    def test_an_absent_head_is_accepted(self, tmp_path: Path) -> None:
        tensors = random_tensors(self.shape)
        assert HEAD not in tensors
        open_folder(write_one(tmp_path, tensors), self.shape)

    def test_an_equal_head_is_accepted(self, tmp_path: Path) -> None:
        tensors = random_tensors(self.shape)
        tensors[HEAD] = tensors[EMBEDDING].clone()
        weights = open_folder(write_many(tmp_path, tensors), self.shape)
        assert torch.equal(weights.read(EMBEDDING, dtype=torch.float32), tensors[EMBEDDING])

    def test_a_different_head_is_refused(self, tmp_path: Path) -> None:
        tensors = random_tensors(self.shape)
        tensors[HEAD] = tensors[EMBEDDING].clone()
        tensors[HEAD][-1, -1] += 1
        with pytest.raises(
            WeightsError,
            match=r"lm_head\.weight differs from model\.embed_tokens\.weight.*tie_word_embeddings",
        ):
            open_folder(write_one(tmp_path, tensors), self.shape)

    def test_a_folder_with_the_head_only_is_accepted(self, tmp_path: Path) -> None:
        tensors = random_tensors(self.shape)
        tensors[HEAD] = tensors.pop(EMBEDDING)
        weights = open_folder(write_one(tmp_path, tensors), self.shape)
        assert torch.equal(weights.read(EMBEDDING, dtype=torch.float32), tensors[HEAD])

    def test_an_untied_model_needs_its_head(self, tmp_path: Path) -> None:
        with pytest.raises(WeightsError, match=r"1 missing: lm_head\.weight"):
            open_folder(write_one(tmp_path, random_tensors(self.shape)), read_config(LLAMA))


def test_a_base_model_without_its_root_is_accepted_and_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    shape = read_config(LLAMA)
    tensors = random_tensors(shape)
    caplog.set_level("INFO", logger="shardwright")
    weights = open_folder(
        write_one(tmp_path, {name.removeprefix("model."): t for name, t in tensors.items()}), shape
    )
    for name, tensor in tensors.items():
        assert torch.equal(weights.read(name, dtype=torch.float32), tensor)
    assert "lack the root `model.`" in caplog.text


def test_a_tensor_under_two_names_is_surplus(tmp_path: Path) -> None:
    shape = read_config(LLAMA)
    tensors = random_tensors(shape)
    tensors["norm.weight"] = tensors["model.norm.weight"].clone()
    with pytest.raises(WeightsError, match=r"1 surplus: norm\.weight"):
        open_folder(write_one(tmp_path, tensors), shape)


def test_inert_buffers_are_ignored_and_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    shape = read_config(LLAMA)
    tensors = random_tensors(shape)
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(1)
    caplog.set_level("INFO", logger="shardwright")
    open_folder(write_one(tmp_path, tensors), shape)
    assert "ignored 1 buffers without effect" in caplog.text


def test_pickled_weights_are_refused_without_opening_them(tmp_path: Path) -> None:
    class Bomb:
        def __reduce__(self) -> tuple[Any, ...]:
            return (pytest.fail, ("the pickle was opened",))

    (tmp_path / "pytorch_model.bin").write_bytes(pickle.dumps(Bomb()))
    with pytest.raises(WeightsError, match=r"pytorch_model\.bin.*save_pretrained"):
        WeightsFolder(tmp_path)


def test_empty_and_missing_folders_are_refused(tmp_path: Path) -> None:
    with pytest.raises(WeightsError, match="the folder has no weights"):
        WeightsFolder(tmp_path)
    with pytest.raises(WeightsError, match="no such folder"):
        WeightsFolder(tmp_path / "nowhere")


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda content: content[:-5], "damaged, truncated"),
        (lambda content: content + b"\0" * 8, "damaged, truncated"),
        (lambda content: content[:4], "damaged, truncated"),
        (lambda content: b"", "damaged, truncated"),
        (lambda content: content[:8] + b"x" + content[9:], "damaged, truncated"),
        (lambda content: (1 << 60).to_bytes(8, "little") + content[8:], "damaged, truncated"),
        (
            lambda content: b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 5\n",
            "git lfs pull",
        ),
    ],
)
def test_damaged_files_are_named(tmp_path: Path, damage: Any, message: str) -> None:
    file = write_one(tmp_path, random_tensors(read_config(LLAMA))) / WEIGHTS_FILE_NAME
    file.write_bytes(damage(file.read_bytes()))
    with pytest.raises(WeightsError, match=message) as caught:
        WeightsFolder(tmp_path)
    assert WEIGHTS_FILE_NAME in str(caught.value)


class TestIndex:
    """The index is checked against the files before anything is read from them."""

    @pytest.fixture
    def folder(self, tmp_path: Path) -> Path:
        return write_many(tmp_path / "model", random_tensors(read_config(LLAMA)))

    def rewrite_index(self, folder: Path, change: Any) -> None:
        path = folder / INDEX_FILE_NAME
        index = json.loads(path.read_text())
        change(index)
        path.write_text(json.dumps(index))

    @pytest.mark.parametrize(
        "file",
        [
            "../outside.safetensors",
            "/outside.safetensors",
            "a/../../b.safetensors",
            "..\\b.safetensors",
        ],
    )
    def test_files_outside_the_folder_are_refused(self, folder: Path, file: str) -> None:
        save_file({"w": torch.ones(1)}, folder.parent / "outside.safetensors")
        self.rewrite_index(folder, lambda index: index["weight_map"].update(w=file))
        with pytest.raises(WeightsError, match="outside the folder"):
            WeightsFolder(folder)

    def test_a_pickled_file_is_refused(self, folder: Path) -> None:
        self.rewrite_index(folder, lambda index: index["weight_map"].update(w="pytorch_model.bin"))
        with pytest.raises(WeightsError, match="not in safetensors format"):
            WeightsFolder(folder)

    def test_a_missing_file_is_refused(self, folder: Path) -> None:
        (folder / "part-1.safetensors").unlink()
        with pytest.raises(WeightsError, match=r"part-1\.safetensors: the file is missing"):
            WeightsFolder(folder)

    def test_a_tensor_missing_in_its_file_is_refused(self, folder: Path) -> None:
        self.rewrite_index(
            folder,
            lambda index: index["weight_map"].update(
                {HEAD: "part-2.safetensors", "w": "part-0.safetensors"}
            ),
        )
        with pytest.raises(
            WeightsError,
            match=r"not in the file that the index names: lm_head\.weight: part-2.*w: part-0",
        ):
            WeightsFolder(folder)

    def test_a_tensor_in_two_files_is_refused(self, folder: Path) -> None:
        save_file({HEAD: torch.ones(1)}, folder / "part-9.safetensors")
        self.rewrite_index(folder, lambda index: index["weight_map"].update(w="part-9.safetensors"))
        with pytest.raises(
            WeightsError, match=r"lm_head\.weight is in both part-\d\.safetensors and part-9"
        ):
            WeightsFolder(folder)

    @pytest.mark.parametrize(
        "content", ["", "[]", "{}", '{"weight_map": 3}', '{"weight_map": {}}', "\x00"]
    )
    def test_an_invalid_index_is_refused(self, folder: Path, content: str) -> None:
        (folder / INDEX_FILE_NAME).write_text(content)
        with pytest.raises(WeightsError, match=INDEX_FILE_NAME):
            WeightsFolder(folder)

    def test_links_to_a_download_cache_are_accepted(self, folder: Path) -> None:
        blobs = folder.parent / "blobs"
        blobs.mkdir()
        for file in folder.glob("*.safetensors"):
            file.rename(blobs / file.name)
            file.symlink_to(blobs / file.name)
        open_folder(folder, read_config(LLAMA))
