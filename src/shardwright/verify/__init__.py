"""Proof that a layout's gradients are those of one process."""
