"""Known mistakes inside the model: attention, the head, tied embeddings, routers and experts."""

from __future__ import annotations

from shardwright.audit.mistakes.known_mistake import Mistake

MODEL_MISTAKES: dict[str, Mistake] = {
    "key_gradients_lost": Mistake(
        "keys and values get no gradient from queries of some context parallel ranks",
        "Send the gradients of keys and values back to the ranks that own them",
        ("M 1464",),
    ),
    "query_gradients_lost": Mistake(
        "queries get no gradient from keys of some context parallel ranks",
        "Sum the gradient of the queries over all blocks of keys",
        ("M 1464",),
    ),
    "heads_mixed": Mistake(
        "heads are in a wrong order after an all-to-all of sequence parallelism",
        "Join heads with the rank as the first of the two dims",
        ("DS 5664",),
    ),
    "heads_and_tokens_mixed": Mistake(
        "heads of other ranks are read as tokens after an all-to-all of sequence parallelism",
        "Transpose the ranks' dim to the heads before the reshape",
        ("DS 5664",),
    ),
    "head_gradient_not_summed": Mistake(
        "the gradient of the head's input covers one rank's part of the vocabulary",
        "Sum the gradient of the head's input over the tensor parallel ranks",
        ("titan 3412",),
    ),
    "vocabulary_gradients_lost": Mistake(
        "only the part of the vocabulary that has the target gets a gradient",
        "Give the sum of the parts' log-probabilities a backward pass",
        ("ms-swift 9947",),
    ),
    "logits_summed_over_copies": Mistake(
        "a loss that sums over parts of the vocabulary gets whole logits on every tensor parallel "
        "rank",
        "Give it each rank's part of the logits, or compute a loss of the whole vocabulary",
        ("M 7452",),
    ),
    "layers_numbered_by_stage": Mistake(
        "every pipeline stage chooses the kinds of its layers by its own numbers",
        "Number layers over the whole model, not within a stage",
    ),
    "tokens_dropped": Mistake(
        "experts drop tokens above a capacity",
        "Set no capacity, or say that tokens are dropped; the model's class drops none",
    ),
    "tokens_dropped_by_logits": Mistake(
        "experts choose the tokens within their capacity by logits, and prefer tokens of other "
        "experts to negative ones",
        "Choose them by probability",
        ("DS 7986",),
    ),
    "tokens_dropped_by_parts": Mistake(
        "every rank that shares rows fills its part of an expert's capacity by itself",
        "Choose the tokens within the capacity from the whole row",
    ),
    "features_taken_for_slots": Mistake(
        "tensor parallel ranks split the features of the experts' buffer and read them as slots",
        "Split the capacity of the buffer over the ranks, not its features",
        ("DS 8195",),
    ),
    "router_loss_multiplied_by_ranks": Mistake(
        "the router's auxiliary loss is too large by the number of ranks",
        "Multiply only the token loss by the ranks, not the sum with the auxiliary loss: the "
        "reduction averages the latter already",
        ("HF 48690",),
    ),
    "router_loss_multiplied_by_accumulation": Mistake(
        "the router's auxiliary loss is too large by the number of micro-batches",
        "Divide the auxiliary loss of each micro-batch by their number",
        ("Automodel 3359",),
    ),
    "router_loss_divided_by_ranks": Mistake(
        "the router's auxiliary loss is divided by the number of ranks once too often",
        "Average the auxiliary loss over ranks once",
        ("Automodel 1408",),
    ),
    "router_loss_divided_by_accumulation": Mistake(
        "the router's auxiliary loss is divided by the number of micro-batches once too often",
        "Average the auxiliary loss over micro-batches once",
    ),
    "router_loss_multiplied_by_sharing_ranks": Mistake(
        "the router's auxiliary loss is too large by the number of ranks that share rows",
        "Add the auxiliary loss of a row once, not on every tensor or context parallel rank",
    ),
    "router_loss_divided_by_sharing_ranks": Mistake(
        "the router's auxiliary loss is too small by the number of ranks that share rows",
        "Sum the auxiliary loss over ranks that have parts of the same rows; do not average",
        ("M 5047", "M 2237"),
    ),
    "router_loss_scaled": Mistake(
        "the router's auxiliary loss has a wrong factor, of which no known count is the reason",
        "Check by what the auxiliary loss is divided: ranks, micro-batches, rows and tokens",
        ("M 5798",),
    ),
    "router_loss_counts_padding": Mistake(
        "the router's auxiliary loss counts padding",
        "Pass the attention mask to the auxiliary loss",
        ("M 1984",),
    ),
    "router_loss_missing": Mistake(
        "the router's auxiliary loss has no gradient",
        "Add aux_loss x router_aux_loss_coef to the loss, or set output_router_logits to false",
        ("Automodel 1408", "Automodel 2995"),
    ),
    "router_detached": Mistake(
        "no gradient flows through the routers' probabilities",
        "Use a collective with a backward pass where router outputs are gathered or sent",
        ("Automodel 2995",),
    ),
    "tied_counted_once": Mistake(
        "the tied embedding gets the gradient of one of its two uses only",
        "Sum the gradients of the table and of the head",
        (
            "M 6164",
            "DS 7534",
        ),
    ),
    "tied_counted_twice": Mistake(
        "a gradient of the tied embedding is counted twice",
        "Reduce a tied parameter once",
        (
            "M 6164",
            "DS 7534",
        ),
    ),
    "experts_mixed": Mistake(
        "experts' gradients are summed over ranks that have other experts",
        "Reduce expert parameters over the ranks that have the same experts only",
        ("M 6080",),
    ),
}
