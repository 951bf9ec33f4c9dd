"""transformers' model classes behind the interface of our decoder.

transformers' class computes the forward pass. Loss and normaliser, precision, recomputation and
packed documents are ours, and so is all that uses parameter names: sharding, gradient sums and
norms, checkpoints and export.

Legend: B rows, T tokens of a row, N = B x T, R documents, L tokens of the longest, S supervised
tokens, D hidden, V vocabulary.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from shardwright.architecture import AdapterShape, HFShape, ModelShape
from shardwright.config.data import IGNORED_LABEL
from shardwright.config.model import AttentionSetting
from shardwright.errors import ArchitectureError
from shardwright.model.block import RecomputeRunner
from shardwright.model.decoder import Decoder
from shardwright.model.document_rows import split_documents
from shardwright.model.head import LossFunction, RowLoss
from shardwright.model.hf.hf_module import build_hf_module
from shardwright.model.products.linear import Linear
from shardwright.model.routing import ExpertRules
from shardwright.placement.compilation import check_blocks


def build_decoder(
    shape: ModelShape,
    *,
    attention: AttentionSetting = "auto",
    loss_function: LossFunction | None = None,
    compute_dtype: torch.dtype | None = None,
    expert_rules: ExpertRules | None = None,
) -> Decoder:
    """Build the decoder of a shape; call it under `torch.device("meta")`."""
    kind = HFDecoder if isinstance(shape, HFShape) else Decoder
    return kind(
        shape,
        attention=attention,
        loss_function=loss_function,
        compute_dtype=compute_dtype,
        expert_rules=expert_rules,
    )


class HFDecoder(Decoder):
    """Decoder that computes with a transformers class.

    Its children are those of transformers' module, so parameters have transformers' names.
    Packed documents are split and run as separate rows, padded at the end: a causal model does
    not attend to the padding, so no mask is needed, and the class's default positions are
    right.
    """

    is_root_read_in_backward = True
    has_block_wrappers = True
    """True if blocks are wrapped (precision, recomputation) and the loss applies the head."""

    def _add_modules(self, shape: ModelShape) -> None:
        """Add the class's modules; wrap its blocks and its head."""
        assert isinstance(shape, HFShape), shape.family
        with torch.device("cpu"):  # buffers have values, which a meta device would lose
            module = build_hf_module(
                shape,
                eager=self.attention == "explicit",
                compute_dtype=self.compute_dtype or torch.float32,
            )
        self.final_norm = None  # the modules after the blocks are not known
        # Not registered as a submodule: its children are added below, so that parameters keep
        # the names of the weight files.
        object.__setattr__(self, "_module", module)
        for name, child in module.named_children():
            self.add_module(name, child)
        self._recompute_runner: RecomputeRunner | None = None
        self._adapted_modules: list[Any] = []
        if not self.has_block_wrappers:
            return
        for block in self.blocks:
            block.forward = self._wrap_block_forward(block, block.forward)
        if shape.has_plain_head:
            module.get_submodule(shape.head_module).forward = _return_input

    def _add_adapters(self, adapters: AdapterShape) -> None:
        """Add the adapters, the only trainable parameters."""
        for name in sorted(adapters.modules):
            module = self.get_submodule(name)
            assert isinstance(module, nn.Linear), name
            with torch.device("meta"):
                module.lora_A = Linear(module.in_features, adapters.rank, bias=False)
                module.lora_B = Linear(adapters.rank, module.out_features, bias=False)
            adapted_forward = _build_adapted_forward(module, adapters.scale)
            module.forward = adapted_forward  # type: ignore[method-assign, assignment]
            self._adapted_modules.append(module)

    @contextmanager
    def without_adapters(self) -> Iterator[None]:
        """Disable the adapters inside this context; see `Decoder.without_adapters`."""
        for module in self._adapted_modules:
            module.is_adapter_disabled = True
        try:
            yield
        finally:
            for module in self._adapted_modules:
                module.is_adapter_disabled = False

    def _to_hf_name(self, path: str) -> str:
        """Return the path: transformers' modules have the names of the files."""
        return path

    @property
    def blocks(self) -> list[Any]:
        """Blocks of the class, in order."""
        return list(self.hf_module.get_submodule(self._hf_shape.blocks_module).children())

    @property
    def head_weight(self) -> Tensor:
        """Projection to the vocabulary, `[V, D]`."""
        return self._head_module.weight  # type: ignore[return-value]

    @property
    def hf_module(self) -> nn.Module:
        """transformers' module."""
        module: nn.Module = self.__dict__["_module"]
        return module

    @property
    def _hf_shape(self) -> HFShape:
        assert isinstance(self.shape, HFShape)
        return self.shape

    @property
    def _head_module(self) -> nn.Module:
        return self.hf_module.get_submodule(self._hf_shape.head_module)

    def set_recompute(self, run: RecomputeRunner | None) -> None:
        """Call every block through `run(function, *arguments)`; None calls it directly."""
        self._recompute_runner = run

    def compile_blocks(self, **options: Any) -> None:
        """Refuse to compile (`check_blocks`)."""
        check_blocks(True, self.shape)

    def train(self, mode: bool = True) -> HFDecoder:
        """Set training or evaluation mode of the class too."""
        self.hf_module.train(mode)
        super().train(mode)
        return self

    def to_empty(self, *, device: Any, recurse: bool = True) -> HFDecoder:
        """Allocate parameters; keep the values of buffers and the ties between parameters."""
        buffers = {name: buffer.to(device) for name, buffer in self.named_buffers()}
        super().to_empty(device=device, recurse=recurse)
        for name, value in buffers.items():
            module, _, leaf = name.rpartition(".")
            self.get_submodule(module)._buffers[leaf] = value
        for name, tied_to in self._hf_shape.tied_pairs:
            module, _, leaf = name.rpartition(".")
            self.get_submodule(module)._parameters[leaf] = self.get_parameter(tied_to)
        return self

    def _wrap_block_forward(
        self, block: nn.Module, forward: Callable[..., Any]
    ) -> Callable[..., Any]:
        """Wrap a block's forward pass for the compute precision and recomputation."""

        def compute(*args: Any, **kwargs: Any) -> Any:
            with self._cast_parameters(_list_parameter_slots(block)):
                return _copy_view(forward(*args, **kwargs))

        def run(*args: Any, **kwargs: Any) -> Any:
            if self._recompute_runner is None or not torch.is_grad_enabled():
                return compute(*args, **kwargs)
            return self._recompute_runner(lambda *inputs: compute(*inputs, **kwargs), *args)

        return run

    @contextmanager
    def _cast_parameters(self, slots: Sequence[_ParameterSlot]) -> Iterator[None]:
        """Cast parameters to the compute precision inside this context; FSDP2 may have done so.

        With float64, casts of the class to float32 (norms, softmax) go to float64 too, because
        they would limit the accuracy of float64 checks.
        """
        cast: dict[int, Tensor] = {}
        try:
            for module, name, parameter in slots:
                if (
                    self.compute_dtype not in (None, parameter.dtype)
                    and parameter.is_floating_point()
                ):
                    value = cast.setdefault(id(parameter), parameter.to(self.compute_dtype))
                    module._parameters[name] = value  # type: ignore[assignment]
            with Float64Mode() if self.compute_dtype == torch.float64 else contextlib.nullcontext():
                yield
        finally:
            for module, name, parameter in slots:
                module._parameters[name] = parameter

    def _list_parameters_outside_blocks(self) -> list[_ParameterSlot]:
        inside = {
            id(slot.parameter) for block in self.blocks for slot in _list_parameter_slots(block)
        }
        return [slot for slot in _list_parameter_slots(self) if id(slot.parameter) not in inside]

    def forward(
        self,
        input_ids_BT: Tensor,
        *,
        positions_BT: Tensor | None = None,
        document_ids_BT: Tensor | None = None,
        labels_BT: Tensor | None = None,
        **others: Any,
    ) -> Tensor:
        """Compute logits `[B, T, V]`, or with `labels_BT` the summed loss of supervised tokens.

        Labels are already shifted; -100 is not supervised. `positions_BT` is not used: the
        class's default positions start at 0 in every document, as ours do.
        """
        if others.get("cache") is not None:
            raise ArchitectureError(
                f"transformers' {self._hf_shape.class_name} has its own cache; "
                "generation with it is not supported",
                field="model_type",
                got=self.shape.family,
                remedy="Export the model and generate with transformers",
            )
        row_loss: RowLoss | None = others.pop("row_loss", None)
        if row_loss is not None and not self._hf_shape.has_plain_head:
            raise ArchitectureError(
                f"the logits of transformers' {self._hf_shape.class_name} are not only "
                "the product of its head",
                field="preference",
                got=self.shape.family,
                remedy="Preference training needs logits that are a plain product; "
                "fine-tune this model on the chosen responses instead",
            )
        weights_BT: Tensor | None = others.pop("weights_BT", None)
        ignored = {"dropout", "host_labels_BT", "host_document_ids_BT"}
        unsupported = {name for name, value in others.items() if value is not None} - ignored
        assert not unsupported, f"a transformers model does not accept {unsupported}"
        if document_ids_BT is None:
            return self._run_rows(
                input_ids_BT,
                labels_BT,
                None if row_loss is None else row_loss(Tensor.flatten),
                weights_BT,
            )
        documents = split_documents(document_ids_BT, labels_BT)
        if labels_BT is None:
            return documents.gather_from_rows(
                self._run_rows(documents.scatter_to_rows(input_ids_BT, 0), None, None)
            )
        loss = (
            None
            if row_loss is None
            else row_loss(lambda x_BT: documents.scatter_to_rows(x_BT, 0).flatten())
        )
        weights_RL = None if weights_BT is None else documents.scatter_to_rows(weights_BT, 0)
        return self._run_rows(
            documents.scatter_to_rows(input_ids_BT, 0),
            documents.scatter_to_rows(labels_BT, IGNORED_LABEL),
            loss,
            weights_RL,
        )

    def _run_rows(
        self,
        ids_RL: Tensor,
        labels_RL: Tensor | None,
        loss: LossFunction | None,
        weights_RL: Tensor | None = None,
    ) -> Tensor:
        with self._cast_parameters(self._list_parameters_outside_blocks()):
            # With a plain head these are the hidden states before it.
            logits: Tensor = self.hf_module(input_ids=ids_RL).logits
            if self._hf_shape.has_plain_head:
                return self.compute_output(logits, labels_RL, loss=loss, weights_BT=weights_RL)
        if labels_RL is None:
            return logits
        is_supervised = labels_RL != IGNORED_LABEL
        logits_SV = logits[is_supervised].to(torch.promote_types(logits.dtype, torch.float32))
        losses_S = F.cross_entropy(logits_SV, labels_RL[is_supervised], reduction="none")
        return (
            losses_S.sum()
            if weights_RL is None
            else losses_S @ weights_RL[is_supervised].to(losses_S.dtype)
        )

    def compute_output(
        self,
        hidden_BTD: Tensor,
        labels_BT: Tensor | None,
        *,
        cached: bool = False,
        loss: LossFunction | None = None,
        weights_BT: Tensor | None = None,
        num_supervised: int | None = None,
    ) -> Tensor:
        """Compute logits, or the summed loss of the labels, from the head's input."""
        assert not cached, "a transformers model does not use our cache"
        weight_VD = self.head_weight
        bias_V = self._head_module.bias
        assert bias_V is None or isinstance(bias_V, Tensor)
        if labels_BT is None:
            return F.linear(hidden_BTD, weight_VD, bias_V)
        options: dict[str, Any] = {}
        if weights_BT is not None:
            options["weights_N"] = weights_BT.flatten()
        if num_supervised is not None:
            options["num_supervised"] = num_supervised
        return (loss or self.loss_function)(
            hidden_BTD.flatten(0, 1), weight_VD, bias_V, labels_BT.flatten(), **options
        )


class _ParameterSlot(NamedTuple):
    """A module's attribute that is a parameter; a tied parameter has several."""

    module: nn.Module
    name: str
    parameter: nn.Parameter


def _list_parameter_slots(module: nn.Module) -> list[_ParameterSlot]:
    return [
        _ParameterSlot(part, name, parameter)
        for part in module.modules()
        for name, parameter in part._parameters.items()
        if parameter is not None
    ]


def _copy_view(output: Any) -> Any:
    """Copy a block's output if it is a view: in-place operations would lose FSDP2's hook."""
    if isinstance(output, tuple):
        return (_copy_view(output[0]), *output[1:])
    return output.clone() if isinstance(output, Tensor) and output._is_view() else output


def _build_adapted_forward(module: Any, scale: float) -> Callable[[Tensor], Tensor]:
    """Build a linear module's forward pass that adds scale x B A to the class's own product."""
    base_forward = module.forward

    def forward(x: Tensor) -> Tensor:
        product: Tensor = base_forward(x)
        if getattr(module, "is_adapter_disabled", False):
            return product
        update: Tensor = module.lora_B(module.lora_A(x) * scale)
        return product + update

    return forward


def _return_input(x: Tensor) -> Tensor:
    """Replace the head's forward pass: the loss computes the product, in chunks."""
    return x


class Float64Mode(TorchFunctionMode):
    """Mode in which float32, wherever code names it, becomes float64."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = {name: _to_float64(value) for name, value in (kwargs or {}).items()}
        if func is torch.Tensor.float:
            func = torch.Tensor.double
        return func(*(_to_float64(value) for value in args), **kwargs)


def _to_float64(value: Any) -> Any:
    return torch.float64 if value is torch.float32 else value
