"""Traces of devices: the event record of all backends, its columns and files.

events    the record, its columns and checks: `Events`, `Counters`, `Trace`
store     our own format, written during a run: `TraceWriter`
chrome    Chrome's JSON, for Perfetto: `write_chrome`
reading   reads both, and the files of PyTorch's profiler: `read_trace`
"""
