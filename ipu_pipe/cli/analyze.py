"""Analyze a trace: busy devices, who waits for whom, the bottleneck of a run, and changes that
would help.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
from pathlib import Path
from typing import Any

from ipu_pipe.cli.arguments import COMMON, JSON, command, option
from ipu_pipe.errors import BadInput, raise_faults

EPILOG = """
RUN is a run's folder, a *.trace, a Chrome trace of ipu_pipe (trace.json.gz), a trace of PyTorch's profiler or a folder of
them (a file a rank), or PopVision's profile.pop. docs/traces.md says what each number means.

examples:
  python tools/analyze.py runs/digits                         the bottleneck, and what would help
  python tools/analyze.py runs/digits --html digits.html      a page with a timeline to zoom into
  python tools/analyze.py runs/digits --png timeline.png      its timeline as a picture
  python tools/analyze.py runs/digits --against runs/gpipe    span, bubble and stages of two runs, and the settings that differ
"""


@command(
    __doc__,
    EPILOG,
    option("run", metavar="RUN", type=Path, help="a run's folder, or a trace file"),
    option(
        "--against",
        metavar="RUN2",
        type=Path,
        help="compare with another run in about ten lines; --json has all figures",
    ),
    JSON,
    option(
        "--html",
        metavar="FILE",
        type=Path,
        help="write a self-contained page with a timeline to zoom into",
    ),
    option("--png", metavar="FILE", type=Path, help="write the timeline as a picture"),
    *COMMON,
)
def main(args: argparse.Namespace) -> None:
    """Run the command."""
    outputs = {"--png": args.png, "--html": args.html}
    faults = [
        f"{name}: {file}: is a folder, must be a file"
        for name, file in outputs.items()
        if file and file.is_dir()
    ]
    raise_faults(faults)

    # PopVision's file, which Graphcore's library reads
    if args.run.name == "profile.pop":
        record = {"source": str(args.run), "profile": _read_profile(args.run)}
        print(json.dumps(record, indent=1))
        return
    from ipu_pipe.report.analysis.analyze import analyze_run, read_and_analyze
    from ipu_pipe.report.analysis.text import (
        compute_differences,
        format_analysis,
        format_comparison,
    )

    # matplotlib may be missing: report that before the analysis
    if args.png is not None:
        from ipu_pipe.report.plots import check_plots

        check_plots()
    trace, analysis = read_and_analyze(args.run)
    other = None if args.against is None else analyze_run(args.against)
    for file, module, writer in (
        (args.png, "analysis.picture", "draw_timeline"),
        (args.html, "page", "write_page"),
    ):
        if file is not None:
            file.parent.mkdir(parents=True, exist_ok=True)
            getattr(importlib.import_module(f"ipu_pipe.report.{module}"), writer)(
                file, trace, analysis
            )
            args.print_progress(f"written: {file}")
    if args.json:
        if other is not None:
            analysis["against"] = {
                "other": other,
                "differences": compute_differences(analysis, other),
            }
        print(json.dumps(analysis, indent=1))
        return
    if other is None:
        args.print_result(format_analysis(analysis))
    else:
        args.print_result(
            format_comparison(analysis, other, _list_different_settings(args.run, args.against))
        )


def _list_different_settings(run: Path, other: Path) -> list[str] | None:
    """List the keys that differ between the configs of two runs, with both values; None without two
    configs.
    """
    from ipu_pipe.config.compare import flatten, list_changes
    from ipu_pipe.config.faults import show_value
    from ipu_pipe.config.load import read_yaml

    files = [folder / "config.yaml" for folder in (run, other)]
    if not all(file.is_file() for file in files):
        return None
    configs = [flatten(read_yaml(file)) for file in files]
    return [
        f"{key}: {show_value(value)} | {show_value(other_value)}"
        for key, value, other_value in list_changes(*configs)
    ]


def _read_profile(file: Path) -> Any:
    """Return PopVision's profile, which has cycles and memory but no events. Raise `BadInput` if it
    cannot be read.
    """
    from ipu_pipe.backends.ipu.profile import read_profile

    if not file.is_file():
        raise BadInput(f"{file}: no such profile")
    if importlib.util.find_spec("pva") is None:
        raise BadInput(
            f"{file}: is read by Graphcore's pva, which is not installed: open it with PopVision"
        )
    try:
        return read_profile(file)
    except (RuntimeError, AttributeError, ValueError, OSError) as error:
        raise BadInput(f"{file}: cannot be read by pva: {error}") from None
