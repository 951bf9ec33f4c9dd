"""Bytes that embedding, final norm, head and loss save or allocate, outside the layers, and that
all layers share."""

from __future__ import annotations

from shardwright.planner.candidate import Candidate
from shardwright.planner.memory.attention_activations import has_dense_mask
from shardwright.planner.model_costs import ModelFacts


def compute_end_activation_bytes(facts: ModelFacts, candidate: Candidate) -> tuple[float, float]:
    """Return bytes per micro-batch saved outside the layers: by the stage with the embedding,
    and by the stage with the head.

    A trained embedding saves indices. The final norm saves its input if that has a gradient, or the
    head's input has. The chunked loss saves the
    gradient of the norm's output instead of the output; it is counted with the logits.
    """
    tokens = candidate.micro_batch_tokens
    return (
        8.0 * tokens * facts.is_embedding_trained,
        facts.has_hidden_gradient
        * candidate.residual_tokens
        * facts.shape.hidden_size
        * candidate.activation_bytes,
    )


def compute_logit_bytes(facts: ModelFacts, candidate: Candidate) -> tuple[float, float]:
    """Return the bytes at the loss, and the part of them that remains when the backward pass
    begins.

    Chunked loss: the logits of a chunk in the compute precision and, unless losses are fused, in
    fp32 (twice with a soft cap or scale), the gradient of the hidden states, and the gradient of
    the head's weight in fp32 with one matmul result next to it. The weight gradient remains during
    the backward pass. A frozen head has none.
    """
    shape = facts.shape
    size = candidate.activation_bytes
    tp = candidate.layout.tp
    tokens = candidate.micro_batch_tokens
    vocab = shape.vocab_size / tp
    hidden_gradient = tokens * shape.hidden_size * size
    has_weight_gradient = candidate.adapter is None and facts.head.is_trained
    weight = vocab * shape.hidden_size if has_weight_gradient else 0.0
    if candidate.loss_chunk_tokens is None:
        return candidate.engine.compute_full_logit_bytes(tokens, shape.vocab_size, tp), 0.0
    chunk = min(candidate.loss_chunk_tokens, tokens)
    is_unscaled = shape.logit_scale == 1.0 and shape.final_soft_cap is None
    wide = max(size, 4)
    per_logit = wide + (size if is_unscaled or size == wide else size + wide)
    if size == wide:
        per_logit = 2 * wide
    if candidate.has_fused_losses:
        per_logit = size
    weight_gradient = weight * (wide + (size if size != wide else 0))
    num_hidden = candidate.engine.num_chunked_loss_inputs - (not facts.has_hidden_gradient)
    hidden = num_hidden * hidden_gradient
    # Later the hidden states' gradient becomes that of the last layer's output, which is
    # counted there.
    return chunk * vocab * per_logit + hidden + weight_gradient, weight * (
        size if candidate.is_sharded else wide
    )


def compute_shared_table_bytes(facts: ModelFacts, candidate: Candidate) -> float:
    """Compute bytes that all layers of a micro-batch share: fp32 rotary tables, and masks where
    attention is not plainly causal."""
    shape = facts.shape
    tokens = candidate.micro_batch_tokens
    rows = (
        candidate.micro_batch_size
        if candidate.document_tokens is not None or candidate.engine.has_ordered_frees
        else 1
    )
    tables = sum(
        2 * rows * (candidate.sequence_length / candidate.layout.cp) * (rope.rotary_dim // 2) * 4
        for rope in shape.ropes
    )
    masks = 0.0
    for window in {layer.window for layer in facts.unique_layers}:
        if has_dense_mask(facts, candidate, window):
            masks += (
                (candidate.micro_batch_size if candidate.document_tokens is not None else 1)
                * (tokens / candidate.micro_batch_size)
                * candidate.sequence_length
                * candidate.activation_bytes
            )
    has_pairs = candidate.reference != "none" and candidate.engine.has_ordered_frees
    if has_pairs and not masks and not candidate.has_masked_kernels:
        masks = tokens * candidate.sequence_length * candidate.activation_bytes  # of padded rows
    return tables + masks
