"""Records: read from files of any format, recognised, rendered as text, and supervised."""
