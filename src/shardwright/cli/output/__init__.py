"""Output of the verbs: console, tables, progress, and files that pages are written to."""
