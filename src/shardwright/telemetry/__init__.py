"""Events of a run, the metrics derived from them, and the sinks that show them. Imports no torch."""
