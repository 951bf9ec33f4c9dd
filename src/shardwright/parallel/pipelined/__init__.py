"""Products of tensor parallelism that overlap with their communication."""
