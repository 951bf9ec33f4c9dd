"""Attention: projections, rotary embedding, the choice of a kernel, and the cache of generation."""
