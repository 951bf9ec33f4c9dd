"""Norms, gates, rotations and residual sums in one pass over memory each, for uncompiled blocks.

`formulas` has the computations, `operators` compiles each by itself, and `functions` has the
autograd functions that modules call.
"""
