"""Measurements of a run: metrics of ranks, expert loads, rounding, profiles, and its log."""
