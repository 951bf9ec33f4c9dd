"""Table of known mistakes of trainers: plain words, the remedy, and where each was seen.

Numbers are those of docs/silent-bugs.md; links are issues and pull requests.
"""

from __future__ import annotations

from shardwright.audit.mistakes.known_mistake import Mistake
from shardwright.audit.mistakes.model_mistakes import MODEL_MISTAKES

_SUM_TOKENS = (
    "Count the supervised tokens of all micro-batches on all ranks first, and divide every summed "
    "loss by that one number"
)
_ZERO_SKIP = "Check no_sync, the reduction hooks and the loop over micro-batches"

MISTAKES: dict[str, Mistake] = {
    "mean_of_rank_means": Mistake(
        "the loss is averaged per rank, and the means are averaged",
        f"{_SUM_TOKENS}; with DDP or FSDP multiply by the number of ranks, because they average",
        (
            "HF 34242",
            "titan 1842",
        ),
    ),
    "mean_of_micro_batch_means": Mistake(
        "the loss is averaged per micro-batch, and the means are averaged",
        _SUM_TOKENS,
        (
            "HF 34191",
            "HF 35203",
            "HF 37766",
            "HF 46731",
            "torchtune 1875",
        ),
    ),
    "ranks_not_divided": Mistake(
        "the means of the ranks are summed: a division by the number of ranks is missing",
        "Average the means, or divide by the global count of tokens",
    ),
    "accumulation_not_divided": Mistake(
        "the means of the micro-batches are summed: a division by their number is missing",
        "Divide by the number of micro-batches, or better by the global count of tokens",
    ),
    "nothing_divided": Mistake(
        "the means of all micro-batches of all ranks are summed without a division", _SUM_TOKENS
    ),
    "divided_by_accumulation_twice": Mistake(
        "the gradients are divided by the number of micro-batches once too often",
        "Divide in the loss or in the engine, not in both",
        ("DS 8154",),
    ),
    "divided_by_ranks_twice": Mistake(
        "the gradients are divided by the number of ranks once too often",
        "DDP and FSDP already average over ranks; multiply the loss by their number if its "
        "normaliser is global",
        ("DS 5555",),
    ),
    "multiplied_by_ranks": Mistake(
        "the gradients are too large by the number of ranks",
        "Do not multiply a loss by the ranks where gradients are summed",
    ),
    "multiplied_by_accumulation": Mistake(
        "the gradients are too large by the number of micro-batches",
        "Divide by the count of tokens of all micro-batches, not of one",
    ),
    "multiplied_by_sharing_ranks": Mistake(
        "too large by the number of ranks that share rows (tensor, context or pipeline parallel)",
        "Sum losses and counts over the same ranks, context parallel ones included; ranks that "
        "compute the same loss count once",
        ("M 906",),
    ),
    "divided_by_sharing_ranks": Mistake(
        "too small by the number of ranks that share rows (tensor, context or pipeline parallel)",
        "Sum over ranks that have parts of the same rows; do not average",
        ("M 7513", "DS 5555", "SkyRL 1420"),
    ),
    "mean_of_context_means": Mistake(
        "every context parallel rank averages over its own part of the rows, and the means are "
        "averaged",
        _SUM_TOKENS,
        ("M 7513",),
    ),
    "context_not_divided": Mistake(
        "the means of the context parallel ranks are summed: the normaliser leaves them out",
        "Sum the count of tokens over context parallel ranks too",
        ("M 906",),
    ),
    "tokens_not_counted": Mistake(
        "the normaliser misses the tokens of one micro-batch or rank",
        "Count the tokens of every micro-batch on every rank before the first backward pass",
        ("verl 6609",),
    ),
    "all_scaled": Mistake(
        "all gradients have the same wrong factor, of which no known count is the reason",
        "Look for a loss scale that is not divided out, or a factor on the loss",
        ("DS 7839",),
    ),
    "final_scaling_missing": Mistake(
        "the summed loss is not divided by the number of supervised tokens",
        _SUM_TOKENS,
        (
            "Megatron-Bridge 4974",
            "titan 2972",
        ),
    ),
    "sum_averaged_over_ranks": Mistake(
        "the summed loss is divided by the number of ranks only", _SUM_TOKENS
    ),
    "unsupervised_tokens_counted": Mistake(
        "the normaliser counts all tokens, prompt and padding included",
        "Count only labels that are not ignored",
    ),
    "labels_counted_before_shift": Mistake(
        "the normaliser counts labels before they are shifted by one",
        "Count the shifted labels: the first token of a row is no target",
    ),
    "rank_lost": Mistake("the gradients of one rank are lost", _ZERO_SKIP),
    "micro_batch_lost": Mistake(
        "the gradients of one micro-batch are lost",
        "Do not clear gradients between micro-batches, and reduce after the last one",
        (
            "Automodel 3530",
            "DS 6550",
        ),
    ),
    "last_micro_batch_only": Mistake(
        "only the last micro-batch counts",
        "Call zero_grad once per step, not once per micro-batch",
        ("Automodel 3530",),
    ),
    "first_micro_batch_only": Mistake(
        "only the first micro-batch counts",
        "Accumulate every micro-batch, and reduce after the last one",
    ),
    "not_reduced": Mistake(
        "gradients are not summed over the ranks: every rank has those of its own rows",
        "Run the forward pass through the DDP or FSDP wrapper; leave no_sync for the last "
        "micro-batch",
        ("Automodel 3135",),
    ),
    "last_micro_batch_not_reduced": Mistake(
        "the last micro-batch is added after the reduction: it is not summed over the ranks",
        "Reduce after the last backward pass",
        ("DS 7985",),
    ),
    "some_not_reduced": Mistake(
        "these parameters' gradients differ between ranks and their sum or mean is right: they "
        "are not reduced",
        "Reduce them over the ranks that compute parts of them (tensor, sequence or context "
        "parallel ranks)",
        (
            "M 1446",
            "M 7452",
            "gpt-neox 1259",
            "DS 4321",
        ),
    ),
    "clipped_before_reduction": Mistake(
        "every rank clips its own gradient before they are averaged",
        "Clip once, after the reduction, by the norm of the whole gradient",
    ),
    "labels_shifted_twice": Mistake(
        "labels are shifted twice: every token predicts the one after the next",
        "Shift in the data or in the loss, not in both",
    ),
    "labels_not_shifted": Mistake(
        "labels are not shifted: every token predicts itself",
        "Shift the labels by one, in the data or in the loss",
    ),
    "padding_supervised": Mistake(
        "padding is supervised", "Set the labels of padding to the ignored label, -100"
    ),
    "prompt_supervised": Mistake(
        "tokens with the ignored label are supervised",
        "Pass the ignored label to the loss, and the labels to the collator",
    ),
    "documents_attend": Mistake(
        "packed documents attend to each other",
        "Pass document boundaries to attention: cu_seqlens, a block mask, or positions without "
        "an attention mask in transformers",
        (
            "trl 6843",
            "prime-rl 2392",
        ),
    ),
    "positions_not_reset": Mistake(
        "positions are not reset in packed rows", "Start the positions of each document at 0"
    ),
    "targets_cross_documents": Mistake(
        "the last token of a document is trained to predict the first of the next",
        "Ignore the label of each document's first token",
    ),
    "dropout_on": Mistake(
        "dropout is active",
        "Switch dropout off for the recorded step; it is no mistake in training",
    ),
    "pairs_swapped": Mistake(
        "the rejected responses are trained as the chosen ones",
        "Check the order of rows and columns: chosen first",
    ),
    "log_probs_averaged": Mistake(
        "log-probabilities of responses are means over their tokens, not sums",
        "Sum them over the tokens of a response (DPO, equation 7)",
    ),
    "reference_omitted": Mistake(
        "the reference model is left out of the preference loss",
        "Subtract the reference's log-probability of each response",
    ),
    "own_reference": Mistake(
        "the reference of the preference loss is the trained model itself",
        "Keep a copy of the weights before training, or switch the adapters off for the reference",
    ),
    "some_scaled": Mistake(
        "the gradients of these parameters have another factor than the rest",
        "Check which group reduces and divides them",
        (
            "M 5956",
            "M 7165",
            "DS 4957",
            "DS 6546",
            "M 3023",
        ),
    ),
    "gradients_exchanged": Mistake(
        "these parameters have the gradients of others of the same size",
        "Check offsets in gradient buckets, and that no buffer is reused before it is read",
        ("DS 5606", "DS 7965", "DS 8080"),
    ),
    "gradients_are_parameters": Mistake(
        "the gradients of these parameters are the parameters' own values",
        "Give gradients a buffer that gathered parameters do not share",
    ),
    "parameters_in_gradients": Mistake(
        "the parameters' own values are added to the gradients of these parameters",
        "Clear a gradient buffer that received gathered parameters before gradients are added",
        ("M 4609",),
    ),
    "gradients_incomplete": Mistake(
        "the gradients of these parameters lack a micro-batch or a rank",
        "Let the stream that reduces or copies a gradient wait for the stream that computes it",
        ("M 3693", "DS 8080"),
    ),
    "stages_rescaled": Mistake(
        "every pipeline stage divides by the number of micro-batches again",
        "Divide in the last stage only",
        ("DS 8154",),
    ),
    "labels_smoothed": Mistake(
        "labels are smoothed",
        "Set label smoothing to 0, or take this difference for a setting of the trainer",
    ),
    "labels_smoothed_by_parts": Mistake(
        "labels are smoothed over each rank's part of the vocabulary as if it were the whole",
        "Divide by the size of the whole vocabulary",
        ("M 737", "M 7464"),
    ),
    "some_lost": Mistake(
        "these parameters have no gradient",
        "Check that they are in the forward pass, not detached, and in the optimizer",
        ("Automodel 2995",),
    ),
    "not_zeroed": Mistake(
        "gradients of an earlier step are added: they are not cleared",
        "Call zero_grad after each optimizer step",
        ("DS 7839",),
    ),
    "low_precision_accumulation": Mistake(
        "gradients are accumulated in bf16", "Accumulate and reduce gradients in fp32"
    ),
    "same_data": Mistake(
        "ranks read the same rows",
        "Give each data rank its own sampler; if these ranks are one tensor parallel group, pass "
        "Recorder(data_rank=...)",
    ),
    "replicas_differ": Mistake(
        "replicas of parameters differ between ranks",
        "Broadcast the parameters at the start, and reduce every gradient",
        ("Automodel 3135",),
    ),
    "own_loss_reported": Mistake(
        "every rank reports the loss of its own rows, not the global mean",
        "Sum loss and token count over the ranks before dividing",
        ("SkyRL 1420",),
    ),
    "log_ranks_added": Mistake(
        "the reported loss is too large by the logarithm of the number of tensor parallel ranks",
        "Do not gather logits for a loss that sums over parts of the vocabulary",
        ("M 7452",),
    ),
    "own_norm_reported": Mistake(
        "the norm covers only what one rank has",
        "Sum the squares over all shards before the root",
        (
            "DS 5411",
            "M 5916",
            "M 7530",
            "titan 596",
        ),
    ),
    "replicas_counted_in_norm": Mistake(
        "the norm counts every replica", "Count each parameter once", ("titan 2318",)
    ),
    "norm_is_zero": Mistake(
        "the reported norm is 0, but gradients are not",
        "Read the gradients where the optimizer keeps them; with a norm of 0 nothing is clipped",
        ("M a82fa72d",),
    ),
    "not_clipped": Mistake(
        "gradients above the limit are not clipped",
        "Pass a list, not an iterator that the norm has used up, to the clip",
        ("AReaL 335", "DS 5150"),
    ),
    "clip_unbounded": Mistake(
        "gradients below the limit are scaled up by the clip",
        "Bound the clip coefficient by 1",
        ("DS 5150",),
    ),
    "clipped_per_group": Mistake(
        "parameters are clipped in groups, each by its own norm",
        "Clip all parameters by one norm",
        ("Automodel 3816",),
    ),
    "clipped_by_squared_norm": Mistake(
        "gradients are clipped by the square of their norm",
        "Take the root of the sum of squares before the clip",
    ),
    "not_finite_applied": Mistake(
        "gradients with inf or nan were applied: parameters are not finite after the step",
        "Skip the update on all ranks if the norm is not finite",
        ("DS 7171",),
    ),
    "clipped_twice": Mistake("gradients are clipped twice", "Clip once per step"),
    "parameter_not_updated": Mistake(
        "parameters with a gradient are not updated",
        "Build the optimizer after the model is wrapped, from all its trainable parameters",
    ),
    "next_learning_rate": Mistake(
        "the update uses the learning rate of the next step",
        "Step the schedule after the optimizer",
    ),
    "other_learning_rate": Mistake(
        "the update uses another learning rate than the optimizer's group",
        "Check which group each parameter is in",
        (
            "M 4705",
            "DS 7969",
        ),
    ),
    "decay_differs": Mistake(
        "weight decay differs from the parameter's group",
        "Check which group each parameter is in; norms and biases usually do not decay",
    ),
    "optimizer_state_lost": Mistake(
        "the update starts from empty optimizer states",
        "Load the optimizer's states with the parameters",
    ),
    "optimizer_state_stale": Mistake(
        "the update uses the optimizer's states before this gradient",
        "Update the moments before the parameters",
    ),
    **MODEL_MISTAKES,
}
