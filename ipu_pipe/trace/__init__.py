"""Traces of devices: the event record of all backends, its columns and files.

events        the record, its columns and checks: `Events`, `Counters`, `Trace`
store         our own format, written during a run: `TraceWriter`
chrome        Chrome's JSON, for Perfetto: `write_chrome`
json_records  parses JSON as far as viewers read it: `parse_records`
kineto        the records of PyTorch's profiler: `ProfilerRecords`
pipelining    the passes and messages in them: `find_pipeline`
waits         what is waiting and what communication: `split_waits`
popvision     PopVision's system trace, by Graphcore's library: `read_pvti`
tables        events as CSV, SQLite, Parquet and data frames: `write_table`
reading       reads all of these: `read_trace`
"""
