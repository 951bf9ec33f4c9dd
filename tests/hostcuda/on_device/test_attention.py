"""Packed documents and windows by varlen on CUDA: the kernel's arguments, numbers and no waits."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.attention.varlen  # registers the operator
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from shardwright.architecture import ModelShape, read_config
from shardwright.model import Decoder
from tests.hostcuda import device
from tests.reference.cases import CASES, LONG

LENGTHS = ((11, 1, 20, LONG - 32), (LONG - 1, 1))


class OperatorRecorder(TorchDispatchMode):
    """Mode that records the arguments of varlen's operator."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, ...]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.torch_attn._varlen_attn.default:
            self.calls.append(args)
        return func(*args, **(kwargs or {}))


def build_shape(case: str) -> ModelShape:
    return read_config(CASES[case] | {"head_dim": 16})  # flash attention needs a multiple of 8


def compute_gradients(
    case: str, where: str, attention: Any, ids_BT: Tensor, documents_BT: np.ndarray | None
) -> dict[str, Tensor]:
    decoder = Decoder(build_shape(case), attention=attention, compute_dtype=torch.bfloat16)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in decoder.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.1)
    decoder.to(where)
    ids = None if documents_BT is None else torch.from_numpy(documents_BT).to(where)
    decoder(
        ids_BT.to(where),
        labels_BT=ids_BT.roll(-1, 1).to(where),
        document_ids_BT=ids,
        host_document_ids_BT=documents_BT,
    ).backward()
    return {n: p.grad.cpu() for n, p in decoder.named_parameters() if p.grad is not None}


@pytest.mark.parametrize(
    ("case", "is_packed"), [("llama", True), ("mistral-window", True), ("mistral-window", False)]
)
def test_varlen_is_called_with_the_documents(case: str, is_packed: bool) -> None:
    shape = build_shape(case)
    ids_BT = torch.randint(
        0, shape.vocab_size, (2, LONG), generator=torch.Generator().manual_seed(1)
    )
    documents_BT = np.array([np.repeat(np.arange(len(row)), row) for row in LENGTHS])
    documents_BT = documents_BT if is_packed else None
    expected = compute_gradients(case, "cpu", "explicit", ids_BT, documents_BT)
    with OperatorRecorder() as recorder:
        got = compute_gradients(case, "cuda", "auto", ids_BT, documents_BT)
    assert len(recorder.calls) == shape.num_layers
    for layer, call in zip(shape.layers, recorder.calls, strict=True):
        q, k, v, bounds, key_bounds, max_q, max_k, is_causal, scale, window, *_ = call
        assert q.shape == (2 * LONG, shape.num_heads, shape.head_dim)
        assert k.shape == v.shape == (2 * LONG, shape.num_kv_heads, shape.head_dim)
        assert bounds is key_bounds is recorder.calls[0][3]
        documents = [11, 12, 32, LONG, 2 * LONG - 1] if is_packed else [LONG]
        total = [2 * LONG] * (len(bounds) - 1 - len(documents))
        assert bounds.tolist() == [0, *documents, *total]
        assert LONG - 1 <= max_q == max_k <= LONG
        assert is_causal == (layer.window is None)
        assert scale == layer.attention_scale
        assert window == [-1 if layer.window is None else layer.window - 1, 0]
    scale = max(gradient.norm() for gradient in expected.values())
    for name, gradient in expected.items():
        assert (got[name] - gradient).norm() <= 0.02 * scale, name


def test_the_host_waits_for_documents_only_if_it_does_not_have_them() -> None:
    documents_BT = np.zeros((2, 16), dtype=np.int64)
    documents_BT[:, 9:] = 1
    decoder = Decoder(build_shape("llama"), compute_dtype=torch.bfloat16).to("cuda")
    ids_BT = torch.zeros(2, 16, dtype=torch.int64, device="cuda")
    on_device = torch.from_numpy(documents_BT).to("cuda")
    for host, num_waits in ((documents_BT, 0), (None, 1)):
        with device.log_synchronisations() as waits:
            decoder.compute_hidden(ids_BT, document_ids_BT=on_device, host_document_ids_BT=host)
        assert sum(waits.values()) == num_waits, waits
