"""Rates that a device reaches: shares of data-sheet rates, fitted once, or measured rates."""
