"""Where a job runs. One job in, one trace out; each backend says what it refuses before it starts."""
