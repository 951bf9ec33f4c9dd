"""Training data: sources, tokenizers, the validation split, samples and their order."""
