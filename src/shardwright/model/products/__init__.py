"""Matrix products of the decoder: plain, by expert, of quantised operands, of 4-bit weights."""
