"""Events of a run, metrics derived from them, and sinks that show them. Imports no torch."""
