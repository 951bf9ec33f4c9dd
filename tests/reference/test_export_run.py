"""`shardwright export RUN` compares the folder with transformers before it reports success."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from shardwright.cli.main import run as shardwright
from shardwright.errors import CheckFailed, ExitCode
from shardwright.inference.export import (
    check_with_transformers,
    compute_expected_logits,
    export_hf_folder,
)
from shardwright.inference.model_source import load_decoder, open_model_source
from tests.unit.training.finished import make_run


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_run(tmp_path_factory.mktemp("runs") / "made", precision="fp32").path


def test_an_exported_run_is_loaded_by_transformers(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    assert (
        shardwright(["export", str(run), "--out", str(out), "--json", "--max-shard-gb", "0.001"])
        == ExitCode.DONE
    )
    report = json.loads(capsys.readouterr().out)
    assert report["checked"] is True
    hf_model, loading = AutoModelForCausalLM.from_pretrained(out, output_loading_info=True)
    assert not any(loading.values())
    assert hf_model.dtype == torch.float32
    tokenizer = AutoTokenizer.from_pretrained(out)
    ids = tokenizer("abcadefj", return_tensors="pt").input_ids
    assert ids.tolist() == [open_model_source(run).load_tokenizer().encode("abcadefj")]
    decoder = load_decoder(open_model_source(run), device=torch.device("cpu"), dtype=torch.float32)
    with torch.no_grad():
        torch.testing.assert_close(hf_model(ids).logits, decoder(ids), rtol=1e-5, atol=1e-5)


def test_the_check_detects_one_weight(run: Path, tmp_path: Path) -> None:
    """It detects one transposed matrix, and a tensor that is missing in the file."""
    source = open_model_source(run)
    export_hf_folder(source, tmp_path / "good", dtype=torch.float32)
    assert (
        check_with_transformers(tmp_path / "good", compute_expected_logits(source, torch.float32))
        < 1e-5
    )

    def read_transposed(name: str) -> torch.Tensor:
        return (
            source.read(name).T
            if name == "model.layers.1.self_attn.q_proj.weight"
            else source.read(name)
        )

    export_hf_folder(
        replace(source, read=read_transposed),
        tmp_path / "swapped",
        dtype=torch.float32,
        check=False,
    )
    with pytest.raises(CheckFailed, match="logits differ"):
        check_with_transformers(
            tmp_path / "swapped", compute_expected_logits(source, torch.float32)
        )
    config = tmp_path / "good" / "config.json"
    config.write_text(
        config.read_text().replace('"num_hidden_layers": 2', '"num_hidden_layers": 3')
    )
    with pytest.raises(CheckFailed, match=r"missing_keys.*model\.layers\.2\."):
        check_with_transformers(tmp_path / "good", compute_expected_logits(source, torch.float32))
    config.write_text(
        config.read_text().replace('"num_attention_heads": 4', '"num_attention_heads": 5')
    )
    with pytest.raises(CheckFailed, match="transformers cannot load the folder"):
        check_with_transformers(tmp_path / "good", compute_expected_logits(source, torch.float32))


def test_without_transformers_every_tensor_is_read_back(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert (
        shardwright(["export", str(run), "--out", str(tmp_path / "out"), "--no-check"])
        == ExitCode.DONE
    )
    assert "all tensors read back" in capsys.readouterr().err
    source = open_model_source(run)
    calls = dict[str, int]()

    def read_changing(name: str) -> torch.Tensor:
        """Return another tensor the second time, so that file and source differ."""
        calls[name] = calls.get(name, 0) + 1
        return source.read(name) + (calls[name] > 1 and name == "model.layers.1.mlp.up_proj.weight")

    with pytest.raises(
        CheckFailed, match=r"model\.layers\.1\.mlp\.up_proj\.weight differs when read back"
    ):
        export_hf_folder(
            replace(source, read=read_changing),
            tmp_path / "changed",
            dtype=torch.float32,
            check=False,
        )
    assert not (tmp_path / "changed").exists()


def test_a_failed_check_leaves_no_folder(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shardwright.inference.export.LOGIT_TOLERANCE", -1.0)
    assert (
        shardwright(["export", str(run), "--out", str(tmp_path / "out")]) == ExitCode.CHECK_FAILED
    )
    assert not list(tmp_path.iterdir())
