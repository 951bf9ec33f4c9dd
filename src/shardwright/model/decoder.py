"""Configurable decoder. Its parameters have the names and shapes of Hugging Face files.

Modules have plain attribute names; `named_parameters` and state dicts translate them to the
names of the family (`architecture.module_names`), the only ones used outside the decoder.

Legend: B sequences, T tokens, N = B x T, D hidden, V vocabulary.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from shardwright.architecture import AdapterShape, ModelShape
from shardwright.config.model import AttentionSetting
from shardwright.layout import PipelineStage
from shardwright.model.attention.attention import describe_attention
from shardwright.model.attention.kv_cache import KeyValueCache
from shardwright.model.block import Block, RecomputeRunner, build_norm
from shardwright.model.dropout import DropoutKey, DropoutSite, has_dropout
from shardwright.model.embedding import Embedding
from shardwright.model.forward_context import build_default_positions, build_forward_context
from shardwright.model.head import (
    Head,
    LossFunction,
    RowLoss,
    compute_full_logits_loss,
    compute_logits,
)
from shardwright.model.moe import ExpertStack
from shardwright.model.parallel_hooks import NO_PARALLEL_HOOKS, ParallelHooks
from shardwright.model.pointwise.functions import FusedFunctions
from shardwright.model.products.linear import Linear
from shardwright.model.products.scaled_product import RoundingTotals
from shardwright.model.products.working_weights import (
    WorkingWeights,
    declare_working_weight,
    read_weight,
)
from shardwright.model.routing import ExpertRules, RouterTotals, RoutingContext
from shardwright.model.state_dict_names import rename_from_hf, rename_to_hf
from shardwright.model.tensor_parallel_hooks import TensorParallelHooks

logger = logging.getLogger("shardwright")


class Decoder(nn.Module):
    """Model from token ids to logits, or to the summed loss of their labels.

    Build it under any device context, `torch.device("meta")` included. It has no buffers.
    Parameters are uninitialised until `weight_init` or `hf_weights` fills them.
    """

    parallel_hooks: ParallelHooks = NO_PARALLEL_HOOKS
    rounding_totals: RoundingTotals | None = None  # None without quantised operands
    rounding_key: Tensor | None = None
    """Key of a step's random numbers; None if nothing is rounded stochastically."""
    label_smoothing: float = 0.0
    """Fraction of each target spread evenly over the vocabulary, in training."""
    noise_size: float = 0.0
    """Largest absolute value of the noise added to embeddings in training (NEFTune)."""
    working_weights: WorkingWeights | None = None
    is_root_read_in_backward = False
    """True if the backward pass reads more parameters outside blocks than the final norm's."""

    def __init__(
        self,
        shape: ModelShape,
        *,
        attention: AttentionSetting = "auto",
        loss_function: LossFunction | None = None,
        compute_dtype: torch.dtype | None = None,
        expert_rules: ExpertRules | None = None,
    ) -> None:
        super().__init__()
        self.shape = shape
        self.compute_dtype = compute_dtype
        self.expert_rules = expert_rules or ExpertRules()
        self.router_totals = RouterTotals()
        self.attention = attention
        self._logged_attention: set[str] = set()
        self.loss_function: LossFunction = loss_function or compute_full_logits_loss
        self._add_modules(shape)
        self.register_state_dict_post_hook(rename_to_hf)
        self.register_load_state_dict_pre_hook(rename_from_hf)
        if shape.adapters is not None:
            for parameter in self.parameters():
                parameter.requires_grad_(False)
            self._add_adapters(shape.adapters)

    def _add_modules(self, shape: ModelShape) -> None:
        """Add the modules of the shape, without adapters."""
        names = shape.names
        width = shape.hidden_size
        self.embedding = Embedding(shape.vocab_size, width, shape.padding_row)
        self.positions = (
            None if names.positions is None else Embedding(shape.max_position_embeddings, width)
        )
        # Keyed by layer, so that parameters of a pipeline stage have the whole model's names.
        self.layers = nn.ModuleDict(
            {str(index): Block(shape, index) for index in range(shape.num_layers)}
        )
        self.final_norm: nn.Module | None = build_norm(shape)
        if shape.tied_embeddings:
            declare_working_weight(self.embedding, "weight")
        else:
            self.head = Head(shape.vocab_size, width)

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield parameters by their Hugging Face names, in the order of the modules."""
        start = f"{prefix}." if prefix else ""
        for path, parameter in super().named_parameters("", recurse, remove_duplicate):
            yield start + self._to_hf_name(path), parameter

    def _to_hf_name(self, path: str) -> str:
        """Translate a parameter's path here to its Hugging Face name."""
        return self.shape.names.to_hf_name(path)

    @property
    def blocks(self) -> list[Block]:
        """Blocks in order; FSDP wraps their `forward`."""
        return [block for block in self.layers.values() if isinstance(block, Block)]

    @property
    def head_weight(self) -> Tensor:
        """Projection to the vocabulary, `[V, D]`; the embedding's table if they are tied."""
        return self.embedding.weight if self.shape.tied_embeddings else self.head.weight

    def _add_adapters(self, adapters: AdapterShape) -> None:
        """Add the adapters, the only trainable parameters, and quantise the frozen matrices."""
        packed = {
            spec.name for spec in self.shape.list_parameters() if spec.packed_matrix is not None
        }
        for index, block in enumerate(self.blocks):
            number = 0
            for path, module in list(block.named_modules()):
                if not isinstance(module, Linear | ExpertStack):
                    continue
                name = self._to_hf_name(f"layers.{index}.{path}.weight")
                if name.removesuffix(".weight") in adapters.modules:
                    if isinstance(module, Linear):
                        module.add_adapter(adapters, number)
                        number += 1
                    else:
                        module.add_adapter(adapters)
                if name in packed:
                    module.quantise()

    @contextmanager
    def without_adapters(self) -> Iterator[None]:
        """Disable the adapters inside this context; no effect on a model without adapters.

        Use it under `no_grad`, as for a frozen reference model: a backward pass after the
        context would recompute with adapters.
        """
        adapted = [
            module
            for module in self.modules()
            if isinstance(module, Linear | ExpertStack) and module.adapters is not None
        ]
        for module in adapted:
            module.is_adapter_enabled = False
        try:
            yield
        finally:
            for module in adapted:
                module.is_adapter_enabled = True

    def set_recompute(self, run: RecomputeRunner | None) -> None:
        """Call every block through `run(function, *arguments)`; None calls it directly."""
        for block in self.blocks:
            block._recompute_runner = run

    def compile_blocks(self, **options: Any) -> None:
        """Apply torch.compile to each block; modules and parameter names do not change.

        Blocks of one kind (`LayerShape`) share one graph: nothing that differs between them is
        read in compiled code. Under deterministic algorithms Inductor measures no kernels, since
        its choice could differ between runs.
        """
        if torch.are_deterministic_algorithms_enabled() and "backend" not in options:
            options["options"] = {**options.get("options", {}), "deterministic": True}
        for block in self.blocks:
            block.compile_forward(**options)

    def install_parallel_hooks(self, hooks: ParallelHooks) -> None:
        """Set the hooks of every module that communicates with other ranks."""
        for module in self.modules():
            if hasattr(module, "parallel_hooks"):
                module.parallel_hooks = hooks  # type: ignore[assignment]

    def fuse_functions(self, fused: FusedFunctions) -> None:
        """Let norms, gates, rotations and residual sums call these outside compiled code."""
        for module in self.modules():
            if hasattr(module, "fused"):
                module.fused = fused  # type: ignore[assignment]

    def select_stages(self, stages: Sequence[PipelineStage]) -> None:
        """Remove the modules outside `stages`; the remaining parameters keep their names."""
        for index in range(self.shape.num_layers):
            if not any(index in stage.layers for stage in stages):
                del self.layers[str(index)]
        has_embedding = any(stage.has_embedding for stage in stages)
        has_head = any(stage.has_head for stage in stages)
        if has_embedding and not has_head and self.shape.tied_embeddings:
            del self.embedding.working_weight  # the head's, on another rank
        if not has_embedding:
            self.positions = None
            if not (has_head and self.shape.tied_embeddings):
                del self.embedding
        if not has_head:
            self.final_norm = None
            if not self.shape.tied_embeddings:
                del self.head

    def forward(
        self,
        input_ids_BT: Tensor,
        *,
        positions_BT: Tensor | None = None,
        document_ids_BT: Tensor | None = None,
        labels_BT: Tensor | None = None,
        dropout: DropoutKey | None = None,
        cache: KeyValueCache | None = None,
        stage: PipelineStage | None = None,
        hidden_BTD: Tensor | None = None,
        row_weight: Tensor | float | None = None,
        row_loss: RowLoss | None = None,
        weights_BT: Tensor | None = None,
        host_labels_BT: np.ndarray | None = None,
        host_document_ids_BT: np.ndarray | None = None,
    ) -> Tensor:
        """Compute logits `[B, T, V]`, or with `labels_BT` the summed loss of supervised tokens.

        Labels are already shifted: `labels[t]` is the target of position t; -100 is not
        supervised. Attention is causal and, with `document_ids_BT`, limited to tokens of the
        same id; documents must be contiguous. `positions_BT` default to 0, 1, 2... in each
        document. A `cache` has the preceding tokens; these tokens are appended to it.

        Inputs are whole rows on every rank; a context-parallel rank computes its tokens only,
        and the loss is theirs. A pipeline `stage` gets the preceding stage's output as
        `hidden_BTD` (None on the stage with the embedding) and returns hidden states unless it
        has the head.

        `row_weight` is the weight of one row's router losses in the gradient. It is given in
        training steps of a sparse model: the experts' capacity is then limited, and the router
        statistics are added to `router_totals`. `row_loss` replaces the token loss. `weights_BT`
        are weights of the token losses. `host_labels_BT` and `host_document_ids_BT` are equal to
        `labels_BT` and `document_ids_BT`; without them the host reads those of the device, and
        waits for it.
        """
        row_chunks = self.parallel_hooks.split_rows(
            input_ids_BT.shape[1], document_ids_BT, host_document_ids_BT
        )
        x_BTD = self.compute_hidden(
            input_ids_BT,
            positions_BT=positions_BT,
            document_ids_BT=document_ids_BT,
            dropout=dropout,
            cache=cache,
            stage=stage,
            hidden_BTD=hidden_BTD,
            row_weight=row_weight,
            host_document_ids_BT=host_document_ids_BT,
            row_chunks=row_chunks,
        )
        if stage is not None and not stage.has_head:
            return x_BTD
        token_indices_T = self.parallel_hooks.find_local_tokens(row_chunks)
        loss = (
            None
            if row_loss is None
            else row_loss(lambda x_BT: _select_tokens(x_BT, token_indices_T).flatten())
        )
        labels_BT = None if labels_BT is None else _select_tokens(labels_BT, token_indices_T)
        weights_BT = None if weights_BT is None else _select_tokens(weights_BT, token_indices_T)
        return self.compute_output(
            x_BTD,
            labels_BT,
            cached=cache is not None,
            loss=loss,
            weights_BT=weights_BT,
            num_supervised=self.parallel_hooks.count_supervised(host_labels_BT, row_chunks),
        )

    def compute_hidden(
        self,
        input_ids_BT: Tensor,
        *,
        positions_BT: Tensor | None = None,
        document_ids_BT: Tensor | None = None,
        dropout: DropoutKey | None = None,
        cache: KeyValueCache | None = None,
        stage: PipelineStage | None = None,
        hidden_BTD: Tensor | None = None,
        row_weight: Tensor | float | None = None,
        host_document_ids_BT: np.ndarray | None = None,
        row_chunks: Any = None,
    ) -> Tensor:
        """Compute the final norm's output, `[B, T, D]`; without the norm, the last block's.

        `row_chunks` is the split of the rows over context ranks, which is computed without it.
        """
        if row_chunks is None:
            row_chunks = self.parallel_hooks.split_rows(
                input_ids_BT.shape[1], document_ids_BT, host_document_ids_BT
            )
        if self.working_weights is not None:
            self.working_weights.cast()
        num_tokens = input_ids_BT.shape[1]
        if positions_BT is None:
            positions_BT = build_default_positions(
                input_ids_BT, document_ids_BT, 0 if cache is None else cache.num_tokens
            )
        token_indices_T = self.parallel_hooks.find_local_tokens(row_chunks)
        is_first_stage = hidden_BTD is None
        tensor = self._get_tensor_parallel(cached=cache is not None)
        shared_rows = self.parallel_hooks.context
        x_BTD = hidden_BTD
        if x_BTD is None:
            x_BTD = self.embed(
                _select_tokens(input_ids_BT, token_indices_T),
                _select_tokens(positions_BT, token_indices_T),
                tensor,
            )
        is_random = has_dropout(self.shape) or self.noise_size > 0.0
        context = build_forward_context(
            self.shape,
            x_BTD,
            positions_BT,
            document_ids_BT,
            token_indices_T,
            num_tokens=num_tokens,
            dropout=dropout if is_random else None,  # hashes cost 12 kernels a layer
            attention=self.attention,
            cache=cache,
            routing=self._build_routing_context(row_weight),
            row_chunks=row_chunks,
            tensor_parallel=tensor,
            host_document_ids_BT=host_document_ids_BT,
            has_whole_rows=shared_rows is None or shared_rows.has_whole_rows,
        )
        self._log_attention(describe_attention(context))
        if is_first_stage and context.dropout is not None and self.shape.embedding_dropout > 0.0:
            x_BTD = context.dropout.select_local_tokens(tensor).drop(
                x_BTD, self.shape.embedding_dropout, DropoutSite.EMBEDDING
            )
        if is_first_stage and context.dropout is not None and self.noise_size > 0.0:
            x_BTD = context.dropout.select_local_tokens(tensor).add_noise(x_BTD, self.noise_size)
        for block in self.blocks:
            if stage is None or block.layer_index in stage.layers:
                if self.working_weights is not None:
                    self.working_weights.quantise(block)
                x_BTD = block(x_BTD, context)
        if cache is not None:
            cache.num_tokens += num_tokens
        if context.routing is not None:
            self.router_totals.add(context.routing)
        if stage is None or stage.has_head:
            assert self.final_norm is not None
            x_BTD = self.final_norm(x_BTD)
        return x_BTD

    def _log_attention(self, text: str) -> None:
        """Log the attention kernels of a forward pass, each choice once."""
        if text not in self._logged_attention:
            self._logged_attention.add(text)
            logger.info("attention: %s", text)

    def _build_routing_context(self, row_weight: Tensor | float | None) -> RoutingContext | None:
        if row_weight is None or self.shape.experts is None:
            return None
        num_sparse_layers = sum(layer.sparse for layer in self.shape.layers)
        return RoutingContext(self.expert_rules, row_weight, num_sparse_layers)

    def _get_tensor_parallel(self, *, cached: bool) -> TensorParallelHooks | None:
        """Return the tensor-parallel hooks; with a cache, without sequence parallelism."""
        tensor = self.parallel_hooks.tensor
        return tensor.without_sequence_parallel() if tensor is not None and cached else tensor

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
        """Compute logits, or the summed loss of the labels, from the final norm's output.

        `cached`: True if the pass that computed `hidden_BTD` used a cache. `num_supervised`: number
        of supervised tokens, if the host knows it.
        """
        shape = self.shape
        head = self.embedding if shape.tied_embeddings else self.head
        weight_VD: Tensor = head.weight
        tensor = self._get_tensor_parallel(cached=cached)
        vocabulary = None if tensor is None else tensor.shard_vocabulary(shape.vocab_size)
        if tensor is not None:
            hidden_BTD = tensor.prepare_input(hidden_BTD)
        options: dict[str, Any] = {"vocabulary": vocabulary, "num_supervised": num_supervised}
        if loss is None and self.training and self.label_smoothing > 0.0:
            options["label_smoothing"] = self.label_smoothing
        options["weights_N"] = None if weights_BT is None else weights_BT.flatten()
        loss = loss or self.loss_function
        if labels_BT is not None and getattr(loss, "casts_weight", False):
            options["working_VD"] = head.working_weight
        else:
            weight_VD = read_weight(weight_VD, head.working_weight, hidden_BTD.dtype)
        form: dict[str, Any] = {"logit_scale": shape.logit_scale, "soft_cap": shape.final_soft_cap}
        if labels_BT is None:
            logits_BTV = compute_logits(hidden_BTD, weight_VD, None, **form)
            return logits_BTV if vocabulary is None else vocabulary.gather_logits(logits_BTV)
        options = {name: value for name, value in options.items() if value is not None}
        inputs = (hidden_BTD.flatten(0, 1), weight_VD, None, labels_BT.flatten())
        return loss(*inputs, **form, **options)

    def embed(
        self,
        input_ids_BT: Tensor,
        positions_BT: Tensor,
        tensor_parallel: TensorParallelHooks | None = None,
    ) -> Tensor:
        """Compute scaled token embeddings, plus learned positions, in the compute precision."""
        x_BTD: Tensor = self.embedding(input_ids_BT, tensor_parallel)
        if self.compute_dtype is not None:
            x_BTD = x_BTD.to(self.compute_dtype)
        if tensor_parallel is not None:
            x_BTD = tensor_parallel.reduce_output(x_BTD)
            positions_BT = tensor_parallel.select_local_tokens(positions_BT)
        if self.positions is not None:
            x_BTD = x_BTD + self.positions(positions_BT).to(x_BTD.dtype)
        if self.shape.embedding_scale != 1.0:
            x_BTD = x_BTD * self.shape.embedding_scale
        return x_BTD


def _select_tokens(x_BT: Tensor, token_indices_T: Tensor | None) -> Tensor:
    """Select columns of a tensor of rows; None selects all."""
    return x_BT if token_indices_T is None else x_BT[:, token_indices_T]
