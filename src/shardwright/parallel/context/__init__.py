"""Context parallelism: attention over rows whose tokens are on several ranks."""
