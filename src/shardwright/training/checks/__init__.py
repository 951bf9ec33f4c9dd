"""Checks of a run before ranks start, and the choices that all ranks agree on."""
