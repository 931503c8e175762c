"""What several test files share: models, runs, forked processes and data."""
