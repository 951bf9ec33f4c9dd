"""What the model learns from: sources, tokenizers, the split, samples and their order."""
