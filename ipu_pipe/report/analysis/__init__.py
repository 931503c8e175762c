"""Compute the figures of a trace from its columns, and show them as text and pictures.

docs/reference/analysis.md explains each figure.

    analyze        all figures as one record, for all outputs: `analyze`, `analyze_run`
    metadata       the keys of a trace's metadata: `RunMetadata`
    devices        the time, memory and messages of each device
    stages         the passes, stragglers and staleness of stages
    critical_path  the chain that decides the span, and what would shorten it
    bottleneck     what holds the run up, and the remedy: `find_bottleneck`
    text           the figures as text, of one trace or of two
    picture        the timeline as a picture
"""
