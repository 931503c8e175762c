"""Share models, runs, forked processes and data between test files."""
