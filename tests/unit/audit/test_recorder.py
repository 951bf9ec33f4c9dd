"""The recorder alone: it changes nothing, needs nothing, and describes shards."""

from __future__ import annotations

import json
import math
import subprocess
import sys
import types
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from shardwright.audit.record import load_step
from shardwright.audit.recorder import (
    Recorder,
    RecorderError,
    ShardBox,
    ShardInfo,
    project,
    strip_wrappers,
)
from shardwright.cli.main import run as shardwright
from shardwright.errors import ExitCode
from shardwright.optim.local_updates import AdamW
from shardwright.optim.sharded_optimizer import DeviceFactor
from tests.unit.audit.simulated_trainer import build_initial_model


def train(model: nn.Module, recorder: Recorder | None, *, num_steps: int = 4) -> list[Any]:
    """Train by a plain loop with dropout, clipping and a schedule; return losses and weights."""
    torch.manual_seed(1)
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, 5)
    losses = []
    for step in range(num_steps):
        ids = torch.randint(0, 31, (2, 8), generator=torch.Generator().manual_seed(step))
        if recorder is not None:
            recorder.before_step(model, optimizer=optimizer)
        for rows in ids.chunk(2):
            loss = model(input_ids=rows, labels=rows).loss / 2
            loss.backward()
            losses.append(loss.detach().clone())
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        if recorder is not None:
            recorder.after_step(model, loss=losses[-1])
    return [*losses, *(p.detach().clone() for p in model.parameters())]


def test_the_run_is_bit_equal_with_and_without_the_recorder(tmp_path: Path) -> None:
    import copy

    model = build_initial_model("dropping", 0)
    plain = train(copy.deepcopy(model), None)
    recorder = Recorder(tmp_path, steps=[1, 2, 4])
    recorded = train(copy.deepcopy(model), recorder)
    assert all(torch.equal(one, other) for one, other in zip(plain, recorded, strict=True))
    assert {path.name for path in tmp_path.iterdir()} == {
        "step-000001",
        "step-000002",
        "step-000004",
    }


def test_reports_of_later_steps_do_not_change_a_record(tmp_path: Path) -> None:
    model = build_initial_model("llama", 0)
    recorder = Recorder(tmp_path)
    ids = torch.arange(8).view(1, 8)
    for step in range(1, 3):
        with recorder.record_step(model):
            model(input_ids=ids, labels=ids).loss.backward()
            recorder.report(loss=float(step))
        recorder.report(gradient_norm=10.0 * step)
        model.zero_grad()
    values = load_step(tmp_path).values
    assert values["reported_loss"] == 1.0
    assert values["reported_gradient_norm"] == 10.0


def test_a_step_without_gradients_is_refused(tmp_path: Path) -> None:
    model = build_initial_model("llama", 0)
    recorder = Recorder(tmp_path)
    recorder.before_step(model)
    model(input_ids=torch.arange(8).view(1, 8)).logits.sum().backward()
    model.zero_grad()
    with pytest.raises(RecorderError, match="no recorded parameter has a gradient"):
        recorder.after_step(model)


def test_hooks_are_removed_after_a_step_and_after_an_error(tmp_path: Path) -> None:
    model = build_initial_model("llama", 0)
    original = nn.utils.clip_grad_norm_
    recorder = Recorder(tmp_path)

    def fail_in_a_step() -> None:
        with recorder.record_step(model):
            assert nn.utils.clip_grad_norm_ is not original
            raise KeyError

    with pytest.raises(KeyError):
        fail_in_a_step()
    assert nn.utils.clip_grad_norm_ is original
    assert not model._forward_pre_hooks
    assert not model._forward_hooks


def test_the_file_of_the_recorder_replaces_another_only_with_overwrite(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "recorder.py"
    path.write_text("mine\n")
    for words in ([], ["--out", str(path)]):
        assert shardwright(["audit", "recorder", *words]) == ExitCode.WRONG_INPUT
        error = capsys.readouterr().err
        assert "recorder.py" in error
        assert "--overwrite" in error
        assert path.read_text() == "mine\n"
    assert shardwright(["audit", "recorder", "--overwrite"]) == ExitCode.DONE
    assert "class Recorder" in path.read_text()


def test_a_copy_of_the_file_works_where_shardwright_cannot_be_imported(tmp_path: Path) -> None:
    assert shardwright(["audit", "recorder", "--out", str(tmp_path / "recorder.py")]) == 0
    script = """
import sys
import types
sys.modules["shardwright"] = None
import torch
from recorder import Recorder
model = torch.nn.Linear(2, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
recorder = Recorder("out")
with recorder.record_step(model):
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
loaded = {name.partition(".")[0] for name in sys.modules}
assert not loaded & {"transformers", "numpy.testing"}, loaded
"""
    done = subprocess.run(
        [sys.executable, "-I", "-c", f"import sys; sys.path.insert(0, '.')\n{script}"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    values = json.loads((tmp_path / "out/step-000001/rank-00000.json").read_text())
    assert values["optimizers"][0]["groups"][0]["lr"] == 0.1
    assert set(values["parameters"]) == {"weight", "bias"}


def test_nothing_of_the_environment_is_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SECRET_TOKEN", "do-not-record-me")
    model = build_initial_model("llama", 0)
    model.config._name_or_path = "/home/somebody/models"
    try:
        train(model, Recorder(tmp_path), num_steps=1)
    finally:
        del model.config._name_or_path
    for path in tmp_path.rglob("rank-*"):
        content = path.read_bytes()
        for secret in (b"do-not-record-me", b"somebody", str(tmp_path).encode()):
            assert secret not in content, path


def test_raw_gradients_and_the_clip_are_recorded(tmp_path: Path) -> None:
    train(build_initial_model("llama", 1), Recorder(tmp_path), num_steps=1)
    record = load_step(tmp_path)
    values = record.values
    assert values["gradients_copied_at"] == "clip_grad_norm_"
    norm = sum(float(record.join("gradient", n)[0].square().sum()) for n in record.parameter_info)
    assert values["clip_calls"][0]["norm"] == pytest.approx(norm**0.5, rel=1e-5)
    assert len(values["micro_batches"]) == 2
    scales = values["applied_scales"].values()
    assert min(scales) == pytest.approx(0.5 / norm**0.5, rel=1e-3)
    assert values["start_learning_rates"] == [1e-2]
    assert values["next_learning_rates"][0] < 1e-2


def test_parameters_can_be_chosen_by_name(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path, parameters="*.layers.0.*")
    train(build_initial_model("llama", 0), recorder, num_steps=1)
    names = set(load_step(tmp_path).parameter_info)
    assert names
    assert all(".layers.0." in name for name in names)
    with pytest.raises(RecorderError, match=r"no parameter matches .*; the model has"):
        train(build_initial_model("llama", 0), Recorder(tmp_path, parameters="nothing"))


def test_names_lose_the_parts_that_wrappers_add() -> None:
    for name in (
        "module.model.layers.0.weight",
        "_fsdp_wrapped_module.model.layers.0._fsdp_wrapped_module.weight",
        "_orig_mod.model.layers.0._checkpoint_wrapped_module.weight",
        "module._orig_mod.model.layers.0.weight",
        "_orig_mod.module.model.layers.0.weight",
    ):
        assert strip_wrappers(name) == "model.layers.0.weight"
    assert strip_wrappers("encoder.module.weight") == "encoder.module.weight"


def test_megatron_attributes_describe_a_shard_and_need_the_rank(tmp_path: Path) -> None:
    def build() -> nn.Module:
        model = nn.Linear(4, 2, bias=False)
        model.weight.tensor_model_parallel = True
        model.weight.partition_dim = 0
        return model

    batch = {"input_ids": torch.ones(1, 4), "labels": torch.ones(1, 4)}
    with pytest.raises(RecorderError, match="tensor_parallel=\\(rank, size\\)"):
        Recorder(tmp_path).before_step(build(), batch)
    for rank in range(2):
        model = build()
        recorder = Recorder(
            tmp_path, tensor_parallel=(rank, 2), data_rank=0, rank=rank, world_size=2
        )
        with recorder.record_step(model, batch):
            model(torch.ones(1, 4)).sum().backward()
    record = load_step(tmp_path)
    assert record.parameter_info["weight"]["shape"] == [4, 4]
    assert record.join("before", "weight")[0].shape == (4, 4)


def test_an_unknown_tensor_is_refused_with_a_way_out(tmp_path: Path) -> None:
    class Packed(nn.Parameter):
        pass

    model = nn.Linear(2, 2, bias=False)
    model.weight = Packed(torch.ones(2, 2))
    with pytest.raises(RecorderError, match=r"weight is a Packed.*shard_of"):
        Recorder(tmp_path).before_step(model)
    shard = ShardInfo((2, 2), (ShardBox((0, 0), (0, 0), (2, 2)),))
    recorder = Recorder(tmp_path, shard_of=lambda name, parameter: shard)
    with recorder.record_step(model):
        model(torch.ones(1, 2)).sum().backward()
    assert load_step(tmp_path).parameter_info["weight"]["kind"] == "by hand"


class DeepSpeedEngine(nn.Module):
    """Engine by its name only: the recorder refuses before it calls DeepSpeed."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module


@pytest.mark.parametrize("kind", ["plain", "tensor parallel", "DTensor", "DeepSpeed"])
def test_experts_of_other_ranks_under_one_name_are_refused(tmp_path: Path, kind: str) -> None:
    """Megatron and DeepSpeed mark experts by `allreduce=False`; ranks have other experts."""
    model = nn.Sequential(OrderedDict(experts=nn.Linear(3, 2, bias=False)))
    weight: Any = model.experts.weight
    weight.allreduce = False
    if kind == "tensor parallel":
        weight.tensor_model_parallel = True
        weight.partition_dim = 0
    if kind == "DTensor":
        weight.device_mesh = object()
    recorded = DeepSpeedEngine(model) if kind == "DeepSpeed" else model
    recorder = Recorder(tmp_path, tensor_parallel=(0, 1) if kind == "tensor parallel" else None)
    with pytest.raises(RecorderError, match=r"experts.weight has allreduce=False.*shard_of"):
        recorder.before_step(recorded)
    assert not list(tmp_path.iterdir())


def test_experts_described_by_hand_are_joined(tmp_path: Path) -> None:
    """Each of two ranks has two of four experts, stacked, under the same name."""
    for rank in range(2):
        model = nn.Sequential(OrderedDict(experts=nn.Linear(3, 2, bias=False)))
        weight: Any = model.experts.weight
        weight.allreduce = False
        with torch.no_grad():
            weight.copy_(torch.arange(6.0).view(2, 3) + 10 * rank)
        shard = ShardInfo((4, 3), (ShardBox((0, 0), (2 * rank, 0), (2, 3)),))
        recorder = Recorder(
            tmp_path, rank=rank, world_size=2, shard_of=lambda name, parameter, s=shard: s
        )
        with recorder.record_step(model):
            model(torch.ones(1, 3)).sum().backward()
    joined = load_step(tmp_path).join("before", "experts.weight")
    assert len(joined) == 1
    assert joined[0][:, 0].tolist() == [0.0, 3.0, 10.0, 13.0]


def test_deepspeed_is_read_through_its_public_functions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stand-in has the names of DeepSpeed's functions; DeepSpeed itself is not needed."""

    class DeepSpeedEngine(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.module = nn.Linear(3, 2, bias=False)
            self.num_calls = 0

        def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
            return self.module(input_ids).sum()

        def is_gradient_accumulation_boundary(self) -> bool:
            return self.num_calls == 1

        def step(self) -> None:
            """Accumulate in the first call; clear the gradients in the second, as an update."""
            if self.is_gradient_accumulation_boundary():
                utils.safe_get_full_grad = lambda parameter: None
            self.num_calls += 1

    engine = DeepSpeedEngine()
    whole = torch.arange(6.0).view(2, 3)
    utils = types.ModuleType("deepspeed.utils")
    utils.safe_get_full_fp32_param = lambda parameter: whole
    utils.safe_get_full_grad = lambda parameter: 10.0**engine.num_calls * whole
    monkeypatch.setitem(sys.modules, "deepspeed", types.ModuleType("deepspeed"))
    monkeypatch.setitem(sys.modules, "deepspeed.utils", utils)
    recorder = Recorder(tmp_path)
    recorder.before_step(engine)
    for _ in range(2):
        engine(torch.ones(1, 3)).backward()
        engine.step()
    recorder.after_step(engine)
    assert "step" not in vars(engine)
    record = load_step(tmp_path)
    assert torch.equal(record.join("before", "weight")[0], whole)
    assert torch.equal(record.join("gradient", "weight")[0], 10 * whole)


def test_a_model_inside_a_deepspeed_engine_is_refused(tmp_path: Path) -> None:
    model = nn.Linear(3, 2)
    model.weight._hp_mapping = None  # type: ignore[attr-defined]
    with pytest.raises(RecorderError, match="give before_step the engine"):
        Recorder(tmp_path).before_step(model)


def test_projections_of_shards_add_up_and_preserve_norms() -> None:
    torch.manual_seed(0)
    whole = torch.randn(12, 7)
    every = project("w", whole, (12, 7), [ShardBox((0, 0), (0, 0), (12, 7))], 64)
    parts = [
        project("w", whole[a:b], (12, 7), [ShardBox((0, 0), (a, 0), (b - a, 7))], 64)
        for a, b in ((0, 5), (5, 12))
    ]
    assert torch.allclose(every, sum(parts), atol=1e-12)
    ratios = []
    for number in range(300):
        vector = torch.randn(2000)
        shape = (2000,)
        sketch = project(f"p{number}", vector, shape, [ShardBox((0,), (0,), shape)], 64)
        ratios.append(float(sketch.norm() / vector.norm()))
    assert torch.tensor(ratios).mean() == pytest.approx(1.0, abs=0.02)
    assert torch.tensor(ratios).std() == pytest.approx((2 * 64) ** -0.5, rel=0.2)


def test_gradients_that_the_optimizer_s_closure_computes_are_recorded(tmp_path: Path) -> None:
    model = build_initial_model("llama", 0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ids = torch.arange(8).view(1, 8)
    computed: dict[str, torch.Tensor] = {}

    def compute() -> torch.Tensor:
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        computed.update({n: p.grad.clone() for n, p in model.named_parameters()})
        return loss

    with Recorder(tmp_path).record_step(model):
        optimizer.step(compute)
    record = load_step(tmp_path)
    assert computed
    for name, gradient in computed.items():
        assert torch.equal(record.join("gradient", name)[0], gradient)
    assert record.values["applied_scales"]


@pytest.mark.parametrize("factor", [0.5, math.nan])
def test_an_update_that_the_device_skips_is_not_recorded(tmp_path: Path, factor: float) -> None:
    model = build_initial_model("llama", 0)
    optimizer = AdamW(list(model.named_parameters()), lr=0.1, fused=True)
    ids = torch.arange(8).view(1, 8)
    with Recorder(tmp_path).record_step(model):
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.device_factor = DeviceFactor.from_value(torch.tensor(factor))
        optimizer.step()
    values = load_step(tmp_path).values
    assert values["squared_gradient_norms"]
    if math.isnan(factor):
        assert (values["optimizers"], values["applied_scales"]) == ([], {})
    else:
        assert list(values["applied_scales"].values()) == pytest.approx(
            [factor] * len(values["parameters"])
        )
