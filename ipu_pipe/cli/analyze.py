"""Analyze a trace: who is busy, who waits for whom, what holds a run up and what would help."""

from __future__ import annotations

import importlib
import importlib.util
import json
from pathlib import Path
from typing import Any, Dict, Optional, Sequence, Tuple

from ipu_pipe.cli.arguments import add_quiet, add_traceback, get_say, get_tell
from ipu_pipe.errors import BadInput, Parser, show_traceback

EPILOG = """
RUN is a run's folder, a *.trace, a Chrome trace of ipu_pipe (trace.json.gz), a trace of PyTorch's profiler or a folder of
them (a file a rank), or PopVision's profile.pop. docs/traces.md says what each number means.

examples:
  python tools/analyze.py runs/digits                         what holds the run up, and why
  python tools/analyze.py runs/digits --html digits.html      a page with a timeline to zoom into
  python tools/analyze.py runs/digits --png timeline.png      its timeline as a picture
  python tools/analyze.py runs/digits --against runs/gpipe    two runs side by side
"""


def make_parser() -> Parser:
    """Return the command's parser."""
    p = Parser(prog="tools/analyze.py", description=__doc__, epilog=EPILOG)
    p.add_argument("run", metavar="RUN", type=Path, help="a run's folder, or a trace file")
    p.add_argument("--against", metavar="RUN2", type=Path, help="another run, to compare with the first")
    p.add_argument("--json", action="store_true", help="print JSON")
    p.add_argument("--html", metavar="FILE", type=Path, help="write a self-contained page with a timeline to zoom into")
    p.add_argument("--png", metavar="FILE", type=Path, help="write the timeline as a picture")
    add_quiet(p)
    add_traceback(p)
    return p


def main(arguments: Optional[Sequence[str]] = None) -> None:
    """Run the command."""
    args = make_parser().parse_args(arguments)
    with show_traceback(args.traceback):
        outputs = {"--png": args.png, "--html": args.html}
        faults = [f"{name}: {file}: is a folder, must be a file" for name, file in outputs.items() if file and file.is_dir()]
        if faults:
            raise BadInput(faults)
        from ipu_pipe.trace.reading import PROFILE

        if args.run.name == PROFILE:
            print(json.dumps({"source": str(args.run), "profile": _read_profile(args.run)}, indent=1))
        else:
            _analyze(args.run, args.against, args.png, args.html, args.json, args.quiet)


def _analyze(run: Path, against: Optional[Path], png: Optional[Path], html: Optional[Path], json_: bool, quiet: bool) -> None:
    """Analyze a run, write its picture and page, and print the analysis."""
    from ipu_pipe.report.analysis.text import compute_differences, format_analysis, format_comparison

    if png is not None:  # matplotlib may be missing: say so before the analysis
        from ipu_pipe.report.plots import check_plots

        check_plots()
    trace, analysis = _read(run)
    other = None if against is None else _read(against)[1]
    for file, writer in ((png, "analysis.picture:draw_timeline"), (html, "page.write:write_page")):
        if file is not None:
            file.parent.mkdir(parents=True, exist_ok=True)
            module, _, name = writer.partition(":")
            getattr(importlib.import_module(f"ipu_pipe.report.{module}"), name)(file, trace, analysis)
            get_say(quiet)(f"written: {file}")
    if json_:
        more = {} if other is None else {"other": other, "differences": compute_differences(analysis, other)}
        print(json.dumps({**analysis, **({"against": more} if more else {})}, indent=1))
        return
    get_tell(quiet)(format_analysis(analysis))
    if other is not None:
        get_tell(quiet)("\n" + format_comparison(analysis, other))


def _read(run: Path) -> Tuple[Any, Dict[str, Any]]:
    from ipu_pipe.report.analysis.analyze import analyze
    from ipu_pipe.trace.reading import read_trace

    trace = read_trace(run)
    return trace, analyze(trace, str(run))


def _read_profile(file: Path) -> Any:
    """Return PopVision's profile, which has cycles and memory but no events. Raise `BadInput` if it cannot be read."""
    from ipu_pipe.backends.ipu.profile import read_profile

    if not file.is_file():
        raise BadInput(f"{file}: no such profile")
    if importlib.util.find_spec("pva") is None:
        raise BadInput(f"{file}: is read by Graphcore's pva, which is not installed: open it with PopVision")
    try:
        return read_profile(file)
    except (RuntimeError, AttributeError, ValueError, OSError) as error:
        raise BadInput(f"{file}: cannot be read by pva: {error}") from None
