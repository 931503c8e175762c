"""The trace of a pipeline: record it, write it, and show its page in a notebook."""

from __future__ import annotations

from dataclasses import dataclass, replace
from html import escape
from pathlib import Path

from ipu_pipe.backends import world
from ipu_pipe.backends.interface import Engine
from ipu_pipe.config.sections import TraceConfig
from ipu_pipe.errors import BadInput
from ipu_pipe.job.record import Job
from ipu_pipe.report.analysis.analyze import read_and_analyze
from ipu_pipe.report.analysis.text import Analysis, format_analysis
from ipu_pipe.report.page import write_page
from ipu_pipe.report.position import Position
from ipu_pipe.report.run_trace import choose_stage_costs, write_measured_trace, write_modelled_trace

# pixels of the page in a notebook
HEIGHT = 720


@dataclass(frozen=True, repr=False)
class PipelineTrace:
    """A trace that was written.

    `file`: the events, which `ipu_pipe analyze` reads; `page`: a self-contained page, which a
    notebook shows; `analysis`: the figures, as `ipu_pipe.analyze_run` returns them.
    """

    file: Path
    page: Path
    analysis: Analysis

    def __repr__(self) -> str:
        return format_analysis(self.analysis)

    def _repr_html_(self) -> str:
        # in a frame of its own, whose styles and scripts do not meet the notebook's
        page = escape(self.page.read_text(encoding="utf-8"))
        return f'<iframe title="trace" srcdoc="{page}" style="width:100%;height:{HEIGHT}px;border:0"></iframe>'


def choose_traced_updates(trace: range | bool | None, accumulate: int) -> range:
    """Return the updates to record, of `accumulate` microbatches each. Raise `BadInput` unless
    `trace` is a bool, None or a range.
    """
    if trace is None or trace is False:
        return range(0)
    if trace is True:
        return TraceConfig().updates(accumulate)
    if not isinstance(trace, range) or not trace or trace.start < 0 or trace.step < 1:
        raise BadInput(
            f"trace: {trace!r}: must be True, or a range of updates such as range(10, 20)"
        )
    return trace


def write_trace(job: Job, engine: Engine, folder: Path) -> PipelineTrace | None:
    """Write the recorded events and their page into a folder, on the main process, of several
    columns that of the first one; return None on others.

    `job`: with the schedule of the updates so far. On the emulator, which has no clock of each
    device, the clock plays the schedule with the measured times of the stages' passes.
    """
    # both by all ranks, before those without a report return
    measured = engine.report()
    seconds = engine.profile()
    if measured is None or world.get_replica():
        return None
    if world.get_data_group() is not None:
        # the events are those of this column alone
        job = replace(job, config=job.config.model_copy(update={"replicas": 1}))
    file = folder / "trace.json.gz"
    page = folder / "trace.html"
    folder.mkdir(parents=True, exist_ok=True)
    # the emulator: no device there has a clock
    if measured.events is None:
        write_modelled_trace(job, folder, choose_stage_costs(job, seconds, Position()))
    else:
        write_measured_trace(job, file, measured)
    trace, analysis = read_and_analyze(file)
    write_page(page, trace, analysis)
    return PipelineTrace(file, page, analysis)
