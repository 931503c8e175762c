"""The HTML page of a trace."""
