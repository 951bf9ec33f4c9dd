"""Detect hangs: heartbeats, flight recorder, stack dumps, stragglers."""
