"""From a run's events and counts to numbers, words, pictures and a page.

position     the progress that checkpoints store: `Position`, `LossTrend`
provenance   commit, versions, machine, command and fingerprints of the data
memory       planned memory by stage and device, for memory.json
run_trace    writes a run's trace, measured or modelled
summary      the contents of summary.json: `summarize`
run_text     the text that a run prints before its start and at its end
analysis     the figures of a trace
page         a trace and its figures as one HTML page
static_page  text, tables and curves as one HTML page: `write_static_page`
plots        figures as PNG files
"""
