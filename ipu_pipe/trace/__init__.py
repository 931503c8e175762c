"""Traces of devices: the event record of all backends, its columns and files.

events        the record, its columns and checks: `Events`, `Counters`, `Trace`
store         our own format, written during a run: `TraceWriter`
chrome        Chrome's JSON, for Perfetto: `write_chrome`
perfetto      Perfetto's own protobuf: `write_perfetto`
chakra        Chakra's graphs, for network simulators: `write_chakra`
json_records  parses JSON as far as viewers read it: `parse_records`
kineto        the records of PyTorch's profiler: `ProfilerRecords`
pass_names    how trainers name their passes: `find_pass`
process_groups  which ranks may form a pipeline: `list_partitions`
pipelining    the passes and messages in them: `find_pipeline`
waits         what is waiting and what communication: `split_waits`
popvision     PopVision's system trace, by Graphcore's library: `read_pvti`
tables        events as CSV, SQLite, Parquet and data frames: `write_table`
reading       reads all of these: `read_trace`
"""
