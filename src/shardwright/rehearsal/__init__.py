"""Rehearsal: the real training step on fake devices, with its collectives and memory."""
