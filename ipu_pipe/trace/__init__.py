"""Traces of devices: the event record of all backends, its columns, and the files that contain them.

    events        the record, its columns and checks
    store         our own format, written during a run
    chrome        Chrome's JSON, for Perfetto
    reading       reads both, and the files of PyTorch's profiler
"""
