"""One configurable decoder with the parameter names and shapes of Hugging Face files.

Legend: B sequences, T tokens, N = B x T, D hidden, V vocabulary.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardwright.architecture import AdapterShape, ModelShape
from shardwright.layout import Stage
from shardwright.model.block import Block, Recompute, build_norm
from shardwright.model.cache import KeyValueCache
from shardwright.model.context import build_context, default_positions
from shardwright.model.cuts import WHOLE, Cuts
from shardwright.model.dropout import DropoutKey, Site
from shardwright.model.head import Head, LossFunction, RowLoss, full_logits_loss, head_logits
from shardwright.model.linear import Linear
from shardwright.model.moe import Experts
from shardwright.model.routing import ExpertRules, RouterTally, RoutingContext
from shardwright.model.tensor_cut import TensorCut

log = logging.getLogger("shardwright")


class Embedding(nn.Module):
    """Rows of a table by index; look-ups of `padding_row` send it no gradient."""

    def __init__(self, num_rows: int, width: int, padding_row: int | None = None) -> None:
        super().__init__()
        self.num_rows, self.padding_row = num_rows, padding_row
        self.weight = nn.Parameter(torch.empty(num_rows, width))

    def forward(self, indices: Tensor, tensor: TensorCut | None = None) -> Tensor:
        """The rows; with `tensor`, whose ranks have some of them each, this rank's share of their sum."""
        if tensor is not None:
            return tensor.look_up(indices, self.weight, self.num_rows, self.padding_row)
        return F.embedding(indices, self.weight, self.padding_row)


class Decoder(nn.Module):
    """Token ids to logits, or to the summed loss of their labels.

    Build it under any device context (`torch.device("meta")` included); nothing but parameters is stored. Parameters are
    uninitialised until `init.initialise` or `load` fills them.
    """

    cuts: Cuts = WHOLE
    label_smoothing: float = 0.0
    """Share of each target spread evenly over the vocabulary in the token loss, while training."""
    noise_size: float = 0.0
    """NEFTune: while training, embeddings get noise of up to so much."""
    reads_root_backward = False
    """Whether the backward pass reads more of what lies outside the blocks than the last norm's weight."""

    def __init__(
        self,
        shape: ModelShape,
        *,
        attention: Literal["auto", "explicit"] = "auto",
        loss_function: LossFunction | None = None,
        compute_dtype: torch.dtype | None = None,
        expert_rules: ExpertRules | None = None,
    ) -> None:
        super().__init__()
        self.shape, self.compute_dtype = shape, compute_dtype
        self.expert_rules = expert_rules or ExpertRules()
        self.router_tally = RouterTally()
        self.explicit_attention = attention == "explicit"
        self.loss_function: LossFunction = loss_function or full_logits_loss
        self._build(shape)
        if shape.adapters is not None:
            for parameter in self.parameters():
                parameter.requires_grad_(False)
            self._adapt(shape.adapters)

    def _build(self, shape: ModelShape) -> None:
        """Add the modules that a shape has, but for its adapters."""
        names = shape.names
        root = nn.Module()
        self.add_module(names.root, root)
        root.add_module(names.embedding, Embedding(shape.vocab_size, shape.hidden_size, shape.padding_row))
        if names.positions is not None:
            root.add_module(names.positions, Embedding(shape.max_position_embeddings, shape.hidden_size))
        # Keyed by layer, so that a pipeline stage that holds some of them keeps the names of the whole.
        layers = nn.ModuleDict({str(index): Block(shape, index) for index in range(shape.num_layers)})
        root.add_module(names.layers, layers)
        root.add_module(names.final_norm, build_norm(shape))
        if not shape.tied_embeddings:
            self.add_module(names.head, Head(shape.vocab_size, shape.hidden_size))
        log.info("attention: %s", describe_attention(shape, explicit=self.explicit_attention))

    @property
    def root(self) -> nn.Module:
        """The module that holds all but the head."""
        return self.get_submodule(self.shape.names.root)

    @property
    def blocks(self) -> list[Block]:
        """The blocks in order; their `forward` is what FSDP wraps."""
        layers = self.root.get_submodule(self.shape.names.layers)
        return [block for block in layers.children() if isinstance(block, Block)]

    @property
    def head_weight(self) -> Tensor:
        """The projection to the vocabulary, `[V, D]`: the embedding's table when they are tied."""
        names = self.shape.names
        owner = self.root.get_submodule(names.embedding) if self.shape.tied_embeddings else self.get_submodule(names.head)
        weight: Tensor = owner.weight  # type: ignore[assignment]
        return weight

    @property
    def final_norm(self) -> nn.Module | None:
        """The norm behind the last block; None on a pipeline stage without it."""
        return getattr(self.root, self.shape.names.final_norm, None)

    def _adapt(self, adapters: AdapterShape) -> None:
        """Put adapters beside the matrices that have one; they alone take gradients."""
        packed = {spec.name for spec in self.shape.parameters() if spec.packed is not None}
        for index, block in enumerate(self.blocks):
            prefix = f"{self.shape.names.root}.{self.shape.names.layers}.{index}."
            number = 0
            for name, module in list(block.named_modules()):
                if isinstance(module, Linear):
                    if f"{prefix}{name}" in adapters.modules:
                        module.adapt(adapters, number)
                        number += 1
                    if f"{prefix}{name}.weight" in packed:
                        module.quantise()
                elif isinstance(module, Experts):
                    for stack in (module.gate_up_name, module.down_name):
                        if f"{prefix}{name}.{stack}" in adapters.modules:
                            module.adapt(adapters, stack)
                        if f"{prefix}{name}.{stack}" in packed:
                            module.quantise(stack)

    @contextmanager
    def without_adapters(self) -> Iterator[None]:
        """Compute as the model without its adapters would, for as long as this is entered; nothing where it has none.

        Switched off, adapters get no gradient: enter it under `no_grad` (a frozen reference beside the trained model), because what
        recomputation does in a backward pass comes after it is left.
        """
        adapted = [module for module in self.modules() if isinstance(module, Linear | Experts) and module.adapters is not None]
        for module in adapted:
            module.adapter_on = False
        try:
            yield
        finally:
            for module in adapted:
                module.adapter_on = True

    def set_recompute(self, run: Recompute | None) -> None:
        """Call every block's computation through `run(function, *arguments)`; None calls it directly."""
        for block in self.blocks:
            block._recompute = run

    def compile_blocks(self, **options: Any) -> None:
        """torch.compile each block's computation; modules, parameters and their names stay as they are."""
        for block in self.blocks:
            block._run = torch.compile(block.run, **options)

    def install_cuts(self, cuts: Cuts) -> None:
        """Tell every module that asks for other ranks how to reach them."""
        for module in self.modules():
            if hasattr(module, "cuts"):
                module.cuts = cuts  # type: ignore[assignment]

    def keep(self, stages: Sequence[Stage]) -> None:
        """Drop the modules that none of `stages` has; names of what stays are those of the whole model."""
        names, root = self.shape.names, self.root
        layers = root.get_submodule(names.layers)
        assert isinstance(layers, nn.ModuleDict)
        for index in range(self.shape.num_layers):
            if not any(index in stage.layers for stage in stages):
                del layers[str(index)]
        has_embedding, has_head = any(stage.embedding for stage in stages), any(stage.head for stage in stages)
        if not has_embedding and not (has_head and self.shape.tied_embeddings):
            delattr(root, names.embedding)
        if not has_embedding and names.positions is not None:
            delattr(root, names.positions)
        if not has_head:
            delattr(root, names.final_norm)
            if not self.shape.tied_embeddings:
                delattr(self, names.head)

    def forward(
        self,
        input_ids_BT: Tensor,
        *,
        positions_BT: Tensor | None = None,
        document_ids_BT: Tensor | None = None,
        labels_BT: Tensor | None = None,
        dropout: DropoutKey | None = None,
        cache: KeyValueCache | None = None,
        stage: Stage | None = None,
        hidden_BTD: Tensor | None = None,
        row_weight: Tensor | float | None = None,
        row_loss: RowLoss | None = None,
        weights_BT: Tensor | None = None,
    ) -> Tensor:
        """Logits `[B, T, V]`, or with `labels_BT` the sum of the supervised tokens' losses.

        Labels are shifted already (`labels[t]` is the target of position t; -100 is not supervised). Attention is causal and,
        with `document_ids_BT`, stays among equal ids, each document lying in one piece. `positions_BT` default to each
        document's own 0, 1, 2... A `cache` holds what came before these tokens, and takes them in.

        Rows come whole whatever the cuts; a context rank computes its places of them, and the loss is that of its tokens. A
        pipeline `stage` takes the stage before's output as `hidden_BTD` (None where it has the embedding), and gives its own
        hidden states unless it has the head.

        `row_weight` marks a training step of a sparse model: what one row's router losses weigh in the gradient. Capacity then
        bounds the experts, and `router_tally` takes what the routers did. `row_loss` is taken in place of the token loss, of which
        `weights_BT` says what each label's weighs.
        """
        x_BTD = self.hidden(
            input_ids_BT,
            positions_BT=positions_BT,
            document_ids_BT=document_ids_BT,
            dropout=dropout,
            cache=cache,
            stage=stage,
            hidden_BTD=hidden_BTD,
            row_weight=row_weight,
        )
        if stage is not None and not stage.head:
            return x_BTD
        places_T = self._places(input_ids_BT)
        loss = None if row_loss is None else row_loss(lambda x_BT: _at(x_BT, places_T).flatten())
        labels_BT = None if labels_BT is None else _at(labels_BT, places_T)
        weights_BT = None if weights_BT is None else _at(weights_BT, places_T)
        return self.output(x_BTD, labels_BT, cached=cache is not None, loss=loss, weights_BT=weights_BT)

    def hidden(
        self,
        input_ids_BT: Tensor,
        *,
        positions_BT: Tensor | None = None,
        document_ids_BT: Tensor | None = None,
        dropout: DropoutKey | None = None,
        cache: KeyValueCache | None = None,
        stage: Stage | None = None,
        hidden_BTD: Tensor | None = None,
        row_weight: Tensor | float | None = None,
    ) -> Tensor:
        """The last norm's output, `[B, T, D]`, or that of the last block of a stage without the head."""
        num_tokens = input_ids_BT.shape[1]
        if positions_BT is None:
            positions_BT = default_positions(input_ids_BT, document_ids_BT, 0 if cache is None else cache.length)
        places_T = self._places(input_ids_BT)
        first, tensor = hidden_BTD is None, self._tensor(cached=cache is not None)
        if hidden_BTD is None:
            x_BTD = self.embed(_at(input_ids_BT, places_T), _at(positions_BT, places_T), tensor)
        else:
            x_BTD = hidden_BTD
        context = build_context(
            self.shape,
            x_BTD,
            positions_BT,
            document_ids_BT,
            places_T,
            num_tokens=num_tokens,
            dropout=dropout,
            explicit=self.explicit_attention,
            cache=cache,
            routing=self._routing(row_weight),
            tensor=tensor,
        )
        if first and context.dropout is not None and self.shape.embedding_dropout > 0.0:
            x_BTD = context.dropout.share(tensor).drop(x_BTD, self.shape.embedding_dropout, Site.EMBEDDING)
        if first and context.dropout is not None and self.noise_size > 0.0:
            x_BTD = context.dropout.share(tensor).add_noise(x_BTD, self.noise_size)
        for block in self.blocks:
            if stage is None or block.index in stage.layers:
                x_BTD = block(x_BTD, context)
        if cache is not None:
            cache.length += num_tokens
        if context.routing is not None:
            self.router_tally.add(context.routing)
        if stage is None or stage.head:
            x_BTD = self.root.get_submodule(self.shape.names.final_norm)(x_BTD)
        return x_BTD

    def _routing(self, row_weight: Tensor | float | None) -> RoutingContext | None:
        if row_weight is None or self.shape.experts is None:
            return None
        sparse = sum(layer.sparse for layer in self.shape.layers)
        return RoutingContext(self.expert_rules, row_weight, sparse)

    def _places(self, input_ids_BT: Tensor) -> Tensor | None:
        """The places of the row that this rank has; None for all of them."""
        return None if self.cuts.context is None else self.cuts.context.places(input_ids_BT.shape[1])

    def _tensor(self, *, cached: bool) -> TensorCut | None:
        """The tensor cut of a pass. Tokens that follow cached ones come one at a time: no sequence to cut."""
        tensor = self.cuts.tensor
        return tensor.without_sequence() if tensor is not None and cached else tensor

    def output(
        self,
        hidden_BTD: Tensor,
        labels_BT: Tensor | None,
        *,
        cached: bool = False,
        loss: LossFunction | None = None,
        weights_BT: Tensor | None = None,
    ) -> Tensor:
        """The last norm's output to logits, or to the summed loss of its labels; `cached` as the pass that made it was."""
        shape, weight_VD, tensor = self.shape, self.head_weight.to(hidden_BTD.dtype), self._tensor(cached=cached)
        options: dict[str, Any] = {"logit_scale": shape.logit_scale, "soft_cap": shape.final_soft_cap}
        vocabulary = None if tensor is None else tensor.vocabulary(shape.vocab_size)
        if tensor is not None:
            hidden_BTD = tensor.enter(hidden_BTD)
        if labels_BT is None:
            logits_BTV = head_logits(hidden_BTD, weight_VD, None, **options)
            return logits_BTV if vocabulary is None else vocabulary.whole(logits_BTV)
        if vocabulary is not None:
            options["vocabulary"] = vocabulary
        if loss is None and self.training and self.label_smoothing > 0.0:
            options["label_smoothing"] = self.label_smoothing
        if weights_BT is not None:
            options["weights_N"] = weights_BT.flatten()
        loss = loss or self.loss_function
        return loss(hidden_BTD.flatten(0, 1), weight_VD, None, labels_BT.flatten(), **options)

    def embed(self, input_ids_BT: Tensor, positions_BT: Tensor, tensor: TensorCut | None = None) -> Tensor:
        """Token (and learned position) embeddings of the residual stream in the compute precision, scaled."""
        names, root = self.shape.names, self.root
        x_BTD: Tensor = root.get_submodule(names.embedding)(input_ids_BT, tensor)
        if self.compute_dtype is not None:
            x_BTD = x_BTD.to(self.compute_dtype)
        if tensor is not None:
            x_BTD, positions_BT = tensor.leave(x_BTD), tensor.share(positions_BT)
        if names.positions is not None:
            x_BTD = x_BTD + root.get_submodule(names.positions)(positions_BT).to(x_BTD.dtype)
        if self.shape.embedding_scale != 1.0:
            x_BTD = x_BTD * self.shape.embedding_scale
        return x_BTD


def _at(x_BT: Tensor, places_T: Tensor | None) -> Tensor:
    """Columns of a row-wise tensor; all of them for None."""
    return x_BT if places_T is None else x_BT[:, places_T]


def describe_attention(shape: ModelShape, *, explicit: bool) -> str:
    """Which path attention takes and why, in one line."""
    if explicit:
        return "spelled out, as asked for (model.attention: explicit)"
    if shape.attention_sinks:
        return "spelled out: the fused kernels have no sinks"
    if shape.attention_soft_cap is not None:
        return f"spelled out: the fused kernels have no soft cap ({shape.attention_soft_cap:g})"
    path = "fused kernels"
    windows = sorted({layer.window for layer in shape.layers if layer.window is not None})
    if windows:
        path += f", with a mask for windows of {', '.join(map(str, windows))} tokens"
    if shape.attention_dropout > 0.0:
        path += f"; spelled out in training, where the kernels cannot drop by token (rate {shape.attention_dropout:g})"
    return path
