"""Analyze a trace: who is busy, who waits for whom, what holds a run up and what would help."""

from __future__ import annotations

import argparse
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
    p.add_argument("--against", metavar="RUN2", type=Path, help="another one, to stand beside it")
    p.add_argument("--json", action="store_true", help="for programs")
    p.add_argument("--html", metavar="FILE", type=Path, help="write a page of its own with a timeline to zoom into")
    p.add_argument("--png", metavar="FILE", type=Path, help="write the timeline as a picture")
    add_quiet(p)
    add_traceback(p)
    return p


def main(arguments: Optional[Sequence[str]] = None) -> None:
    """Run the command."""
    args = make_parser().parse_args(arguments)
    with show_traceback(args.traceback):
        _run(args)


def _run(args: argparse.Namespace) -> None:
    from ipu_pipe.trace.reading import PROFILE

    _check_outputs(args)
    if args.run.name == PROFILE:
        _print_profile(args)
        return
    trace, analysis = _analyze(args.run)
    say = get_say(args.quiet)
    other = None if args.against is None else _analyze(args.against)[1]
    if args.png is not None:
        from ipu_pipe.report.analysis.picture import draw_timeline

        args.png.parent.mkdir(parents=True, exist_ok=True)
        draw_timeline(args.png, trace, analysis)
        say(f"written: {args.png}")
    if args.html is not None:
        from ipu_pipe.report.page.write import write_page

        args.html.parent.mkdir(parents=True, exist_ok=True)
        write_page(args.html, trace, analysis)
        say(f"written: {args.html}")
    _print(analysis, other, args)


def _check_outputs(args: argparse.Namespace) -> None:
    faults = [
        f"--{name}: {file}: is a folder, must be a file"
        for name, file in (("png", args.png), ("html", args.html))
        if file is not None and file.is_dir()
    ]
    if faults:
        raise BadInput(faults)
    if args.png is not None:
        from ipu_pipe.report.plots import check_plots

        check_plots()


def _analyze(run: Path) -> Tuple[Any, Dict[str, Any]]:
    from ipu_pipe.report.analysis.analyze import analyze
    from ipu_pipe.trace.reading import read_trace

    trace = read_trace(run)
    return trace, analyze(trace, str(run))


def _print(analysis: Dict[str, Any], other: Optional[Dict[str, Any]], args: argparse.Namespace) -> None:
    from ipu_pipe.report.analysis.text import compute_differences, format_analysis, format_comparison

    if args.json:
        more = (
            {} if other is None else {"against": {"other": other, "differences": compute_differences(analysis, other)}}
        )
        print(json.dumps({**analysis, **more}, indent=1))
        return
    tell = get_tell(args.quiet)
    tell(format_analysis(analysis))
    if other is not None:
        tell("\n" + format_comparison(analysis, other))


def _print_profile(args: argparse.Namespace) -> None:
    """Print PopVision's profile, which has cycles and memory but no events."""
    from ipu_pipe.backends.ipu.profile import read_profile

    if not args.run.is_file():
        raise BadInput(f"{args.run}: no such profile")
    if importlib.util.find_spec("pva") is None:
        raise BadInput(f"{args.run}: is read by Graphcore's pva, which is not installed: open it with PopVision")
    try:
        profile = read_profile(args.run)
    except (RuntimeError, AttributeError, ValueError, OSError) as error:
        raise BadInput(f"{args.run}: cannot be read by pva: {error}") from None
    print(json.dumps({"source": str(args.run), "profile": profile}, indent=1))
