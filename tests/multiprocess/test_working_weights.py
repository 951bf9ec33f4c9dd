"""Working weights: the bits of casts at each use, with fewer casts.

Every case trains twice, with `precision.working_weights` on and off, and compares all weights after
each step. Gradients, clipping and updates are between them.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, Literal

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from shardwright.architecture import read_recipe_shape
from shardwright.architecture.parameter_spec import OnesInit, RowNormsInit
from shardwright.config.low_precision import LowPrecisionRecipe
from shardwright.config.recipe import RecomputeKind
from shardwright.config.training import OptimizerSection, PrecisionSection
from shardwright.data.loader import MicroBatch
from shardwright.errors import RecipeError
from shardwright.layout import Layout
from shardwright.model import Decoder
from shardwright.model.products.linear import Linear
from shardwright.model.products.product import WeightGradientStore
from shardwright.model.products.working_weights import copy_weights
from shardwright.model.weight_init import initialise_parameter
from shardwright.numerics import ChunkedLoss, resolve_dtypes
from shardwright.optim import build_optimizer
from shardwright.parallel import ParallelModel, apply_layout, build_mesh
from shardwright.plans import BatchPlan, Plan, build_plan
from shardwright.training.step import accumulate_gradients, update_parameters
from tests.compiled_graphs import GraphCounter
from tests.multiprocess.models import GPT2, LLAMA, MIXTRAL, TENSOR_LLAMA, build_recipe
from tests.multiprocess.pool import RankPool

TOKENS = 12
NUM_STEPS = 3


@dataclass(frozen=True)
class Case:
    """A model, a layout and options of a run."""

    config: dict[str, Any]
    layout: Layout
    recompute: RecomputeKind = "none"
    kind: Literal["bf16", "fp16", "fp8", "fp32"] = "bf16"
    recipe: LowPrecisionRecipe = "rowwise_with_gw_hp"
    optimizer: Literal["adamw", "adamw_8bit", "adafactor", "muon", "sgd"] = "adamw"
    sections: dict[str, Any] = field(default_factory=dict)
    is_compiled: bool = False
    num_micro_batches: int = 2

    def build_plan(self, working_weights: bool | Literal["auto"]) -> Plan:
        """Build the plan with this setting of the key."""
        shape = read_recipe_shape(build_recipe(self.config, **self.sections))
        options: dict[str, Any] = {"fp8": {"recipe": self.recipe}} if self.kind == "fp8" else {}
        precision = PrecisionSection.model_validate(
            {"kind": self.kind, "working_weights": working_weights, **options}
        )
        batch = BatchPlan(TOKENS, 2, self.num_micro_batches, self.layout.data_ranks)
        return build_plan(shape, self.layout, batch, precision, self.recompute)

    def __str__(self) -> str:
        parts = (self.config["model_type"], self.layout, self.recompute, self.kind, self.optimizer)
        recipe = [self.recipe] * (self.kind == "fp8")
        compiled = ["compiled"] * self.is_compiled
        return "-".join([*map(str, parts), *recipe, *self.sections, *compiled])


WIDE = {"hidden_size": 32, "intermediate_size": 32}
TIED = LLAMA | {"tie_word_embeddings": True}
LORA = {"adapters": {"rank": 4}}
ONE_RANK = Layout()
SINGLE = [
    Case(LLAMA, ONE_RANK),
    Case(TIED, ONE_RANK, "selective", "fp16"),
    Case(GPT2, ONE_RANK, "full", optimizer="sgd"),
    Case(MIXTRAL, ONE_RANK, optimizer="muon"),
    Case(LLAMA, ONE_RANK, "full", sections=LORA),
    Case(LLAMA, ONE_RANK, sections={"adapters": {"rank": 4, "kind": "dora"}}),
    Case(MIXTRAL, ONE_RANK, sections=LORA),
    Case(LLAMA | WIDE, ONE_RANK, kind="fp8"),
    Case(LLAMA | WIDE, ONE_RANK, "full", kind="fp8", recipe="tensorwise", is_compiled=True),
    Case(MIXTRAL | WIDE, ONE_RANK, kind="fp8"),
    Case(LLAMA, ONE_RANK, optimizer="adafactor"),
    Case(LLAMA, ONE_RANK, "selective", is_compiled=True),
    Case(LLAMA, Layout(dp_shard=1, zero_stage=2)),
]
SEVERAL = [
    Case(TIED, Layout(dp_replicate=2, bucket_size_bytes=2048)),
    Case(TENSOR_LLAMA, Layout(tp=2), "selective"),
    Case(LLAMA | WIDE, Layout(tp=2), kind="fp8", recipe="tensorwise"),
    Case(LLAMA | WIDE, Layout(pp=2, schedule="zb_h1"), kind="fp8", recipe="rowwise"),
    Case(TIED, Layout(pp=2)),
    Case(LLAMA, Layout(pp=2, schedule="zb_h1"), num_micro_batches=4),
    Case(MIXTRAL, Layout(dp_replicate=2), optimizer="adamw_8bit"),
]


class CastCounter(TorchDispatchMode):
    """Counts casts of tensors with these shapes to another dtype, and calls that cast many."""

    def __init__(self, shapes: set[torch.Size]) -> None:
        super().__init__()
        self.shapes = shapes
        self.num_casts = 0
        self.num_calls = 0
        self.num_tensors = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        is_cast = func is torch.ops.aten._to_copy.default and args[0].dtype == torch.float32
        if is_cast and args[0].shape in self.shapes and (kwargs or {}).get("dtype"):
            self.num_casts += 1
        if func is torch.ops.aten._foreach_copy_.default:
            self.num_calls += 1
            self.num_tensors += len(args[0])
        return func(*args, **(kwargs or {}))


def build(case: Case, working_weights: bool) -> ParallelModel:
    """Build the model on this rank."""
    plan = case.build_plan(working_weights)
    dtypes = resolve_dtypes(plan.precision)
    with torch.device("meta"):
        loss = ChunkedLoss(8)
        decoder = Decoder(plan.shape, loss_function=loss, compute_dtype=dtypes.compute)
    specs = {spec.name: spec for spec in plan.shape.list_parameters()}
    specs = {  # magnitudes would be computed from a file's matrices
        name: replace(spec, init=OnesInit()) if isinstance(spec.init, RowNormsInit) else spec
        for name, spec in specs.items()
    }
    model = apply_layout(
        decoder,
        plan,
        build_mesh(plan.layout, "cpu"),
        torch.device("cpu"),
        read_slice=lambda name, narrow: initialise_parameter(
            specs[name], 3, dtype=dtypes.param, narrow=narrow
        ),
    )
    assert (model.decoder.working_weights is not None) == working_weights
    if case.is_compiled:
        GraphCounter().compile(model.decoder)
    return model


def make_micro_batches(case: Case, step: int) -> list[MicroBatch]:
    """Build the micro-batches of this rank, different ones on different data ranks."""
    rank = dist.get_rank() if dist.is_initialized() and case.layout.dp_replicate > 1 else 0
    batches = []
    for number in range(case.num_micro_batches):
        random = torch.Generator().manual_seed(100 * step + 10 * rank + number)
        ids_BT = torch.randint(0, 50, (2, TOKENS), generator=random)
        positions_BT = torch.arange(TOKENS).expand(2, TOKENS)
        batches.append(
            MicroBatch(ids_BT, ids_BT.roll(-1, 1), positions_BT, None, torch.arange(2), 2 * TOKENS)
        )
    return batches


def train(case: Case, working_weights: bool) -> list[dict[str, Tensor]]:
    """Train, and return this rank's weights and moments after each step."""
    model = build(case, working_weights)
    optimizer = build_optimizer(
        model.named_parameters(),
        OptimizerSection(name=case.optimizer),
        learning_rate=0.05,
        weight_decay=0.1,
        model=model,
    )
    after = []
    for step in range(NUM_STEPS):
        accumulate_gradients(model, make_micro_batches(case, step), seed=0, step=step)
        update_parameters(model, optimizer, learning_rate=0.05, max_grad_norm=1.0)
        tensors = {name: p.detach().clone() for name, p in model.named_parameters()}
        for name, parameter in model.named_parameters():
            for key, value in optimizer.state[parameter].items():
                if isinstance(value, Tensor) and type(value) is Tensor:
                    tensors[f"{name}.{key}"] = value.clone()
        after.append(tensors)
    return after


def compare(case: Case) -> int:
    """Compare the weights with and without copies; return how many changed in the run."""
    expected = train(case, working_weights=False)
    got = train(case, working_weights=True)
    num_changed = 0
    for found, wanted in zip(got, expected, strict=True):
        assert found.keys() == wanted.keys()
        for name, tensor in wanted.items():
            assert torch.equal(found[name], tensor), name
    for name, tensor in expected[-1].items():
        num_changed += not torch.equal(expected[0][name], tensor)
    return num_changed


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.parametrize("case", SINGLE, ids=str)
def test_weights_and_moments_keep_their_bits(case: Case) -> None:
    assert compare(case) > 5


@pytest.mark.parametrize("case", SEVERAL, ids=str)
def test_weights_and_moments_keep_their_bits_on_several_ranks(ranks: RankPool, case: Case) -> None:
    if case.optimizer == "adamw_8bit":
        pytest.importorskip("torchao.optim", reason="the extra `lowbit` is not installed")
    assert min(ranks.run(2, compare, case)) > 3


def count_casts(case: Case, working_weights: bool) -> tuple[int, int]:
    """Count the casts of matrices in the second step, and the calls that cast many."""
    model = build(case, working_weights)
    optimizer = build_optimizer(
        model.named_parameters(), OptimizerSection(), learning_rate=0.1, weight_decay=0.0
    )
    matrices = {p.shape for name, p in model.named_parameters() if p.ndim > 1}
    counter = CastCounter(matrices)
    for step in range(2):
        if step == 1:
            counter.__enter__()
        accumulate_gradients(model, make_micro_batches(case, step), seed=0, step=step)
        if step == 1:
            counter.__exit__(None, None, None)
        update_parameters(model, optimizer, learning_rate=0.1, max_grad_norm=1.0)
    return counter.num_casts, counter.num_calls


@pytest.mark.parametrize(("recompute", "casts_per_use"), [("none", 1), ("full", 2)])
def test_a_step_casts_each_matrix_once(recompute: RecomputeKind, casts_per_use: int) -> None:
    case = Case(LLAMA, ONE_RANK, recompute)
    num_block_matrices = 7 * LLAMA["num_hidden_layers"]
    # Two micro-batches. The head's gradient, which the loss sums in fp32, is not cast.
    num_casts = 2 * (casts_per_use * num_block_matrices + 1)
    assert count_casts(case, working_weights=False) == (num_casts, 0)
    assert count_casts(case, working_weights=True) == (0, 1)


def test_gradients_accumulate_in_the_masters_dtype() -> None:
    case = Case(LLAMA, ONE_RANK)
    model = build(case, working_weights=True)
    accumulate_gradients(model, make_micro_batches(case, 0), seed=0, step=0)
    for name, parameter in model.named_parameters():
        assert parameter.dtype == torch.float32
        assert parameter.grad is not None, name
        assert parameter.grad.dtype == torch.float32
    assert all(copy.grad is None for copy in model.decoder.working_weights.copies)
    state = model.decoder.state_dict()
    assert state.keys() == {name for name, _ in model.named_parameters()}


def test_a_deferred_gradient_is_none() -> None:
    layer = Linear(6, 4, bias=False)
    layer.gradient_store = WeightGradientStore()
    weights = copy_weights(layer, torch.bfloat16)
    with torch.no_grad():
        layer.weight.fill_(1.0)
    weights.update()
    x = torch.ones(3, 6, dtype=torch.bfloat16, requires_grad=True)
    y = layer(x)
    with layer.gradient_store.defer() as products:
        y.sum().backward()
    assert layer.weight.grad is None  # zeros would take the memory of a gradient
    products[0].accumulate()
    assert layer.weight.grad is not None
    assert layer.weight.grad.dtype == torch.float32


def test_a_forward_pass_casts_only_changed_weights() -> None:
    layers = torch.nn.ModuleList(Linear(6, 4, bias=False) for _ in range(3))
    weights = copy_weights(layers, torch.bfloat16)
    shapes: set[torch.Size] = set()
    with torch.no_grad():
        for layer in layers:
            layer.weight.fill_(1.0)
    for num_changed in (3, 0, 1):
        if num_changed == 1:
            with torch.no_grad():
                layers[1].weight.mul_(2.0)
        with CastCounter(shapes) as counter:
            weights.update()
        assert counter.num_calls == (num_changed > 0)
        assert counter.num_tensors == num_changed
    assert [float(copy.sum()) for copy in weights.copies] == [24.0, 48.0, 24.0]


def test_every_change_of_a_weight_reaches_the_next_forward_pass() -> None:
    model = build(Case(TIED, ONE_RANK), working_weights=True)
    ids_BT = torch.arange(TOKENS).unsqueeze(0)

    def compute_logits() -> Tensor:
        with model.evaluate_mode() as module:
            return module(ids_BT)

    logits = [compute_logits()]
    weights = dict(model.named_parameters())
    with torch.no_grad():  # as a loaded checkpoint
        weights["model.layers.1.mlp.up_proj.weight"].mul_(2.0)
    logits.append(compute_logits())
    # As fused updates, which torch does not count.
    weights["model.embed_tokens.weight"].data.mul_(2.0)
    model.invalidate_weights()
    logits.append(compute_logits())
    plain = build(Case(TIED, ONE_RANK), working_weights=False)
    with torch.no_grad():
        for name, parameter in plain.named_parameters():
            parameter.copy_(weights[name])
    with plain.evaluate_mode() as module:
        assert torch.equal(module(ids_BT), logits[2])
    assert not torch.equal(logits[0], logits[1])
    assert not torch.equal(logits[1], logits[2])


@pytest.mark.parametrize(
    ("case", "expected"),
    [
        (Case(LLAMA, ONE_RANK), True),
        (Case(LLAMA, ONE_RANK, num_micro_batches=1), False),
        (Case(LLAMA, ONE_RANK, "full"), False),
        (Case(LLAMA, ONE_RANK, "full", sections=LORA, num_micro_batches=1), True),
        (Case(LLAMA, Layout(dp_shard=2, zero_stage=1)), False),
        (Case(LLAMA, Layout(dp_shard=1, zero_stage=1)), True),
        (Case(LLAMA, ONE_RANK, kind="fp32"), False),
    ],
    ids=str,
)
def test_auto_takes_no_memory_at_the_peak(case: Case, expected: bool) -> None:
    assert case.build_plan("auto").has_working_weights == expected


def test_copies_that_nothing_would_read_are_refused() -> None:
    with pytest.raises(RecipeError, match=r"precision\.working_weights: zero_stage 2 gathers"):
        Case(LLAMA, Layout(dp_shard=2, zero_stage=2)).build_plan(True)
