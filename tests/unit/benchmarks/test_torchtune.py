"""The contender torchtune: its imports, and its losses next to a plain loop's.

The comparison needs the package itself: `pip install --no-deps torchtune==0.6.1`.
"""

from __future__ import annotations

import importlib
import io
import json
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from benchmarks.case import Case
from benchmarks.contenders import CONTENDERS, with_torchtune
from benchmarks.pace import Pace
from benchmarks.shapes import TINY
from transformers import AutoConfig, AutoModelForCausalLM

NUM_STEPS = 6


def test_stand_ins_replace_packages_that_a_step_does_not_use(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Import a package named torchtune with the real one's forms of use."""
    (tmp_path / "torchtune/training").mkdir(parents=True)
    (tmp_path / "torchtune/__init__.py").touch()
    (tmp_path / "torchtune/training/__init__.py").write_text(
        "import torchao, torchvision\n"
        "from torchvision.transforms.v2 import functional\n"
        "from torchao.dtypes.nf4tensor import NF4Tensor, implements\n"
        "class Quantised(NF4Tensor): ...\n"
        "@implements([1])\n"
        "def double(value): return 2 * value\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    absent = {"torchvision": "no_such_file.py", "torchao": "no_such_file.py"}
    monkeypatch.setattr(with_torchtune, "UNUSED_PACKAGES", absent)
    installed = {name: sys.modules.get(name) for name in absent}
    with_torchtune.import_torchtune()
    training = sys.modules.pop("torchtune.training")
    del sys.modules["torchtune"]
    assert training.double(3) == 6
    assert not isinstance(torch.ones(1), training.NF4Tensor)
    assert installed == {name: sys.modules.get(name) for name in absent}


@pytest.mark.skipif(find_spec("torchtune") is None, reason="needs torchtune")
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("is_tied", [True, False], ids=["tied", "untied"])
def test_the_losses_are_those_of_a_plain_loop(tmp_path: Path, is_tied: bool) -> None:
    config = TINY["tiny"].config
    if not is_tied:
        rope_parameters = {"rope_type": "default", "rope_theta": 500000.0}
        config = config | {"tie_word_embeddings": False, "rope_parameters": rope_parameters}
    (tmp_path / "config.json").write_text(json.dumps(config))
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(tmp_path))
    model.save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(config))
    found, expected = (
        _list_losses(Case(name, 0, "fp32", str(tmp_path), 1, 64, 2))
        for name in ("torchtune", "torch-loop")
    )
    assert found == pytest.approx(expected, rel=1e-5)
    assert found[-1] < found[0] - 0.01


def _list_losses(case: Case) -> list[float]:
    replies = io.StringIO()
    pace = Pace(io.StringIO(f"{NUM_STEPS}\nstop\n"), replies, lambda: None, "cpu")
    importlib.import_module(CONTENDERS[case.contender]).run(case, pace)
    losses: list[float] = json.loads(replies.getvalue().splitlines()[-1])["losses"]
    return losses
