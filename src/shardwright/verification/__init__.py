"""Verification that a layout computes the same gradients as one process."""
