"""Matrix products of the decoder: plain, grouped by expert, of 8-bit operands, of 4-bit weights."""
