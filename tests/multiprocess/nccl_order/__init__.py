"""Runs whose communication is checked in the order in which NCCL would run it."""
