"""From the columns of a trace to numbers, and from these to words and pictures. docs/traces.md says what each number means."""
