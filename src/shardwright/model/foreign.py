"""A model that our decoder does not know, behind the decoder's interface: transformers' class computes, all around it is ours.

Ours are the loss with its one normaliser, the precisions, recompute, packed documents, and all that goes by a parameter's name:
sharding, sums, norms, checkpoints, export.

Legend: B rows, T tokens of a row, N = B x T, R documents, L tokens of the longest, D hidden, V vocabulary.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from shardwright.architecture import AdapterShape, ForeignShape, ModelShape
from shardwright.errors import ArchitectureError, RecipeError
from shardwright.model.block import Recompute
from shardwright.model.decoder import Decoder
from shardwright.model.head import LossFunction, RowLoss
from shardwright.model.linear import Linear
from shardwright.model.routing import ExpertRules
from shardwright.model.theirs import build_module

IGNORED = -100


def build_decoder(
    shape: ModelShape,
    *,
    attention: Literal["auto", "explicit"] = "auto",
    loss_function: LossFunction | None = None,
    compute_dtype: torch.dtype | None = None,
    expert_rules: ExpertRules | None = None,
) -> Decoder:
    """The decoder of a shape, ours or another's; call it under `torch.device("meta")`."""
    kind = ForeignDecoder if isinstance(shape, ForeignShape) else Decoder
    return kind(shape, attention=attention, loss_function=loss_function, compute_dtype=compute_dtype, expert_rules=expert_rules)


class ForeignDecoder(Decoder):
    """Token ids to logits, or to the summed loss of their labels, through a class that we have not written.

    Its parameters have the names of transformers' module, whose children these are. Documents that share a row are taken apart and
    run as rows of their own, filled up at the end: a causal model cannot see what follows, so no mask has to be understood, and
    the class's own default positions are the right ones.
    """

    reads_root_backward = True
    interferes = True
    """Whether blocks are run through precision and recompute, and the head is left to the loss."""

    def _build(self, shape: ModelShape) -> None:
        """Add the class's modules, and stand around its blocks and its head."""
        assert isinstance(shape, ForeignShape), shape.family
        with torch.device("cpu"):  # its buffers are values, which no meta device keeps
            module = build_module(shape, eager=self.explicit_attention)
        # Beside the tree of modules: its children are ours, and so their names stay those of the weights' files.
        object.__setattr__(self, "_module", module)
        for name, child in module.named_children():
            self.add_module(name, child)
        self._recompute: Recompute | None = None
        self._adapted: list[Any] = []
        if not self.interferes:
            return
        for block in self.blocks:
            block.forward = self._around(block, block.forward)
        if shape.plain_head:
            module.get_submodule(shape.head).forward = _give_back

    def _adapt(self, adapters: AdapterShape) -> None:
        """Put adapters beside the matrices that have one; they alone take gradients."""
        for name in sorted(adapters.modules):
            module = self.get_submodule(name)
            assert isinstance(module, nn.Linear), name
            with torch.device("meta"):
                module.lora_A = Linear(module.in_features, adapters.rank, bias=False)
                module.lora_B = Linear(adapters.rank, module.out_features, bias=False)
            module.forward = _beside(module, adapters.scale)  # type: ignore[method-assign, assignment]
            self._adapted.append(module)

    @contextmanager
    def without_adapters(self) -> Iterator[None]:
        """Compute as the model without its adapters would, for as long as this is entered; see `Decoder.without_adapters`."""
        for module in self._adapted:
            module.adapter_off = True
        try:
            yield
        finally:
            for module in self._adapted:
                module.adapter_off = False

    @property
    def root(self) -> nn.Module:
        """The module that holds everything."""
        return self

    @property
    def final_norm(self) -> nn.Module | None:
        """What follows the blocks is not known."""
        return None

    @property
    def blocks(self) -> list[Any]:
        """The class's blocks, in order."""
        return list(self.foreign.get_submodule(self._foreign_shape.blocks).children())

    @property
    def head_weight(self) -> Tensor:
        """The projection to the vocabulary, `[V, D]`."""
        return self._head.weight  # type: ignore[return-value]

    @property
    def foreign(self) -> nn.Module:
        """transformers' module itself."""
        module: nn.Module = self.__dict__["_module"]
        return module

    @property
    def _foreign_shape(self) -> ForeignShape:
        assert isinstance(self.shape, ForeignShape)
        return self.shape

    @property
    def _head(self) -> nn.Module:
        return self.foreign.get_submodule(self._foreign_shape.head)

    def set_recompute(self, run: Recompute | None) -> None:
        """Call every block through `run(function, *arguments)`; None calls it directly."""
        self._recompute = run

    def compile_blocks(self, **options: Any) -> None:
        """Refused: what a foreign block does between its products is not known to compile.

        Raises:
            RecipeError: always.
        """
        raise RecipeError(
            f"blocks of transformers' {self._foreign_shape.class_name} are not compiled",
            field="model.compile",
            got=True,
            allowed="false",
        )

    def train(self, mode: bool = True) -> ForeignDecoder:
        """Switch what the class does only in training, as far as the recipe left it any."""
        self.foreign.train(mode)
        super().train(mode)
        return self

    def to_empty(self, *, device: Any, recurse: bool = True) -> ForeignDecoder:
        """Memory for the parameters; buffers keep their values, and what was one parameter is one again."""
        kept = {name: buffer.to(device) for name, buffer in self.named_buffers()}
        super().to_empty(device=device, recurse=recurse)
        for name, value in kept.items():
            owner, _, leaf = name.rpartition(".")
            self.get_submodule(owner)._buffers[leaf] = value
        for name, owner in self._foreign_shape.ties:
            module, _, leaf = name.rpartition(".")
            self.get_submodule(module)._parameters[leaf] = self.get_parameter(owner)
        return self

    def _around(self, block: nn.Module, forward: Callable[..., Any]) -> Callable[..., Any]:
        """A block's forward pass in the compute precision, recomputed where that is wished."""

        def compute(*arguments: Any, **named: Any) -> Any:
            with self._precision(_parameters_within(block)):
                return _own(forward(*arguments, **named))

        def run(*arguments: Any, **named: Any) -> Any:
            if self._recompute is None or not torch.is_grad_enabled():
                return compute(*arguments, **named)
            return self._recompute(lambda *again: compute(*again, **named), *arguments)

        return run

    @contextmanager
    def _precision(self, held: Sequence[_Held]) -> Iterator[None]:
        """Parameters in the compute precision while entered: where FSDP2 has gathered them so, they are already.

        In float64 whatever the class raises to float32 (norms, softmax) is raised to float64: proofs are no finer than that.
        """
        cast: dict[int, Tensor] = {}
        try:
            for module, name, parameter in held:
                if self.compute_dtype not in (None, parameter.dtype) and parameter.is_floating_point():
                    value = cast.setdefault(id(parameter), parameter.to(self.compute_dtype))
                    module._parameters[name] = value  # type: ignore[assignment]
            with Widened() if self.compute_dtype == torch.float64 else contextlib.nullcontext():
                yield
        finally:
            for module, name, parameter in held:
                module._parameters[name] = parameter

    def _outside_blocks(self) -> list[_Held]:
        inside = {id(held.parameter) for block in self.blocks for held in _parameters_within(block)}
        return [held for held in _parameters_within(self) if id(held.parameter) not in inside]

    def forward(
        self,
        input_ids_BT: Tensor,
        *,
        positions_BT: Tensor | None = None,
        document_ids_BT: Tensor | None = None,
        labels_BT: Tensor | None = None,
        **others: Any,
    ) -> Tensor:
        """Logits `[B, T, V]`, or with `labels_BT` (shifted already, -100 is not supervised) the supervised tokens' summed loss.

        Positions are the class's own: they begin at 0 in every document, as `positions_BT` always does here.
        """
        if others.get("cache") is not None:
            raise ArchitectureError(
                f"transformers' {self._foreign_shape.class_name} keeps its own cache, and we do not generate through it",
                field="model_type",
                got=self.shape.family,
                remedy="Export the model, and generate with transformers",
            )
        row_loss: RowLoss | None = others.pop("row_loss", None)
        if row_loss is not None and not self._foreign_shape.plain_head:
            raise ArchitectureError(
                f"the logits of transformers' {self._foreign_shape.class_name} are more than its head's product",
                field="preference",
                got=self.shape.family,
                remedy="Preferences are learned by models whose head is plain; fine-tune this one on the chosen responses",
            )
        weights_BT: Tensor | None = others.pop("weights_BT", None)
        given = {name for name, value in others.items() if value is not None} - {"dropout"}
        assert not given, f"a foreign model takes no {given}"
        if document_ids_BT is None:
            return self._compute(input_ids_BT, labels_BT, None if row_loss is None else row_loss(Tensor.flatten), weights_BT)
        places = take_apart(document_ids_BT, labels_BT)
        if labels_BT is None:
            return places.back(self._compute(places.rows(input_ids_BT, 0), None, None))
        loss = None if row_loss is None else row_loss(lambda x_BT: places.rows(x_BT, 0).flatten())
        weights_RL = None if weights_BT is None else places.rows(weights_BT, 0)
        return self._compute(places.rows(input_ids_BT, 0), places.rows(labels_BT, IGNORED), loss, weights_RL)

    def _compute(
        self, ids_RL: Tensor, labels_RL: Tensor | None, loss: LossFunction | None, weights_RL: Tensor | None = None
    ) -> Tensor:
        with self._precision(self._outside_blocks()):
            found: Tensor = self.foreign(input_ids=ids_RL).logits
            if self._foreign_shape.plain_head:
                return self.output(found, labels_RL, loss=loss, weights_BT=weights_RL)
        if labels_RL is None:
            return found
        supervised = labels_RL != IGNORED
        logits_SV = found[supervised].to(torch.promote_types(found.dtype, torch.float32))
        losses_S = F.cross_entropy(logits_SV, labels_RL[supervised], reduction="none")
        return losses_S.sum() if weights_RL is None else losses_S @ weights_RL[supervised].to(losses_S.dtype)

    def output(
        self,
        hidden_BTD: Tensor,
        labels_BT: Tensor | None,
        *,
        cached: bool = False,
        loss: LossFunction | None = None,
        weights_BT: Tensor | None = None,
    ) -> Tensor:
        """What the head is given, to logits or to the summed loss of its labels."""
        assert not cached, "a foreign model keeps no cache of ours"
        weight_VD, bias_V = self.head_weight, self._head.bias
        assert bias_V is None or isinstance(bias_V, Tensor)
        if labels_BT is None:
            return F.linear(hidden_BTD, weight_VD, bias_V)
        options = {} if weights_BT is None else {"weights_N": weights_BT.flatten()}
        return (loss or self.loss_function)(hidden_BTD.flatten(0, 1), weight_VD, bias_V, labels_BT.flatten(), **options)


class _Held(NamedTuple):
    """A parameter where a module has it; a tied one stands in several."""

    module: nn.Module
    name: str
    parameter: nn.Parameter


def _parameters_within(module: nn.Module) -> list[_Held]:
    return [
        _Held(part, name, parameter)
        for part in module.modules()
        for name, parameter in part._parameters.items()
        if parameter is not None
    ]


def _own(output: Any) -> Any:
    """A block's output with memory of its own: a class may go on with it in place, which on a view would cut FSDP2's hook off."""
    if isinstance(output, tuple):
        return (_own(output[0]), *output[1:])
    return output.clone() if isinstance(output, Tensor) and output._is_view() else output


def _beside(module: Any, scale: float) -> Callable[[Tensor], Tensor]:
    """A linear module's forward pass with scale x B A beside its matrix, in whatever way the class multiplies with that."""
    plain = module.forward

    def forward(x: Tensor) -> Tensor:
        product: Tensor = plain(x)
        if getattr(module, "adapter_off", False):
            return product
        update: Tensor = module.lora_B(module.lora_A(x))
        return product + scale * update

    return forward


def _give_back(x: Tensor) -> Tensor:
    """In place of the head: its product is made chunk by chunk with the loss."""
    return x


class Places(NamedTuple):
    """Where the tokens of packed rows go when documents are rows: token n of the flat batch is token `column_N[n]` of row
    `row_N[n]`; -1 for documents that are left out."""

    row_N: Tensor
    column_N: Tensor
    num_rows: int
    length: int
    shape: torch.Size

    def rows(self, x_BT: Tensor, fill: int) -> Tensor:
        """A batch's ids or labels as rows of documents, `[R, L]`."""
        x_RL = x_BT.new_full((self.num_rows, self.length), fill)
        kept = self.row_N >= 0
        x_RL[self.row_N[kept], self.column_N[kept]] = x_BT.flatten()[kept]
        return x_RL

    def back(self, x_RLV: Tensor) -> Tensor:
        """What was computed of the documents, where their tokens stood, `[B, T, V]`."""
        return x_RLV[self.row_N, self.column_N].view(*self.shape, -1)


def take_apart(document_ids_BT: Tensor, labels_BT: Tensor | None) -> Places:
    """Each document a row; with labels, those in which nothing is supervised (the filling of a row) are left out.

    One row always stays: under ZeRO every rank has to run.
    """
    begins_BT = torch.ones_like(document_ids_BT, dtype=torch.bool)
    begins_BT[:, 1:] = document_ids_BT[:, 1:] != document_ids_BT[:, :-1]
    begins_N = begins_BT.flatten()
    number_N = begins_N.cumsum(0) - 1
    starts_R = begins_N.nonzero().squeeze(1)
    column_N = torch.arange(len(number_N), device=number_N.device) - starts_R[number_N]
    num_documents = len(starts_R)
    if labels_BT is None:
        return Places(number_N, column_N, num_documents, int(column_N.max()) + 1, document_ids_BT.shape)
    learnt_R = torch.zeros(num_documents, dtype=torch.bool, device=number_N.device)
    learnt_R[number_N[labels_BT.flatten() != IGNORED]] = True
    learnt_R[0] |= ~learnt_R.any()
    new_number_R = torch.where(learnt_R, learnt_R.cumsum(0) - 1, -1)
    row_N = new_number_R[number_N]
    # Two tokens at least: on one alone a recurrent class leaves out how it forgets, and where a parameter takes no part on one rank
    # only, ranks no longer sum the same gradients.
    length = max(2, int(column_N[row_N >= 0].max()) + 1)
    return Places(row_N, column_N, int(learnt_R.sum()), length, document_ids_BT.shape)


class Widened(TorchFunctionMode):
    """float64 wherever the code inside says float32."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = {name: _wide(value) for name, value in (kwargs or {}).items()}
        if func is torch.Tensor.float:
            func = torch.Tensor.double
        return func(*(_wide(value) for value in args), **kwargs)


def _wide(value: Any) -> Any:
    return torch.float64 if value is torch.float32 else value
