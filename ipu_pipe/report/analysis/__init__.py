"""Compute the figures of a trace from its columns, and show them as text and pictures. docs/traces.md explains each figure."""
