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

from ipu_pipe.cli.arguments import COMMON, JSON, command, option, parse_file
from ipu_pipe.errors import BadInput, raise_faults

PROFILE = "profile.pop"
# the formats of --to, and what writes them
WRITERS = {
    **dict.fromkeys((".csv", ".sqlite", ".parquet"), ("trace.tables", "write_table")),
    ".pftrace": ("trace.perfetto", "write_perfetto"),
    ".et": ("trace.chakra", "write_chakra"),
}

EPILOG = """
RUN is a run's folder, a *.trace, a Chrome trace of ipu_pipe (trace.json.gz), a trace of PyTorch's
profiler or a folder of them (a file a rank), or PopVision's profile.pop (or its folder) or *.pvti.
docs/reference/analysis.md says what each number means.

examples:
  python tools/analyze.py runs/digits                         the bottleneck, and what would help
  python tools/analyze.py runs/digits --html digits.html      a page with a timeline to zoom into
  python tools/analyze.py runs/digits --png timeline.png      its timeline as a picture
  python tools/analyze.py runs/digits --against runs/gpipe    two runs, and the settings that differ
  python tools/analyze.py runs/digits --to digits.parquet     its events as a table
  python tools/analyze.py profiler/ --to run.pftrace          any trace for ui.perfetto.dev
  python tools/analyze.py profiler/                           a pipeline of PyTorch, by its profiler
"""


@command(
    __doc__,
    EPILOG,
    option("run", metavar="RUN", type=parse_file, help="a run's folder, or a trace file"),
    option(
        "--against",
        metavar="RUN2",
        type=parse_file,
        help="compare with another run in about ten lines; --json has all figures",
    ),
    JSON,
    option(
        "--html",
        metavar="FILE",
        type=parse_file,
        help="write a self-contained page with a timeline to zoom into",
    ),
    option(
        "--to",
        metavar="FILE",
        type=parse_file,
        help="write the events as a table, FILE.csv, FILE.sqlite or FILE.parquet, or for "
        "ui.perfetto.dev, FILE.pftrace, or for network simulators, FILE.et (Chakra, a file a rank)",
    ),
    option(
        "--passes",
        metavar="PATTERN",
        action="append",
        default=[],
        help="how the ranges or functions of a profiler's trace name passes, beside the trainers "
        "that are known: a regular expression with the groups (?P<kind>...) and, where a name has "
        "them, (?P<stage>...) and (?P<microbatch>...); may be repeated",
    ),
    option("--png", metavar="FILE", type=parse_file, help="write the timeline as a picture"),
    *COMMON,
)
def main(args: argparse.Namespace) -> None:
    """Run the command."""
    outputs = {"--png": args.png, "--html": args.html, "--to": args.to}
    # all of them before the trace is read, which may take minutes
    faults = [
        f"{name}: {file}: is a folder, must be a file"
        for name, file in outputs.items()
        if file and file.is_dir()
    ]
    if args.to is not None and args.to.suffix not in WRITERS:
        faults.append(f"--to: {args.to}: must end in {', '.join(WRITERS)}")
    raise_faults(faults)

    # PopVision's file, which Graphcore's library reads, or the folder of its profiles
    profiles = _find_profiles(args.run)
    if profiles:
        others = {**outputs, "--against": args.against, "--passes": args.passes}
        raise_faults(
            [
                f"{name}: goes with a trace; {profiles[0]} has no events: leave it out"
                for name, value in others.items()
                if value
            ]
        )
        contents = {str(file): _read_profile(file) for file in profiles}
        # a file named itself is the profile; of a folder there is a mapping of files
        record = {"source": str(args.run), "profile": contents.get(str(args.run), contents)}
        print(json.dumps(record, indent=1))
        return
    from ipu_pipe.report.analysis.analyze import read_and_analyze
    from ipu_pipe.report.analysis.text import (
        compute_differences,
        format_analysis,
        format_comparison,
    )

    # matplotlib may be missing: report that before the analysis
    if args.png is not None:
        from ipu_pipe.report.plots import check_plots

        check_plots()
    options = args.passes, args.print_progress
    trace, analysis = read_and_analyze(args.run, *options)
    compared = None if args.against is None else read_and_analyze(args.against, *options)
    other = None if compared is None else compared[1]
    writers: list[tuple[Path | None, str, str, tuple[Any, ...]]] = [
        (args.png, "report.analysis.picture", "draw_timeline", (trace, analysis)),
        (args.html, "report.page", "write_page", (trace, analysis, compared)),
    ]
    if args.to is not None:
        writers.append((args.to, *WRITERS[args.to.suffix], (trace,)))
    for file, module, writer, written in writers:
        if file is not None:
            file.parent.mkdir(parents=True, exist_ok=True)
            # by name: a format loads the library that it needs only when it is asked for; of
            # Chakra's files there is one for each rank
            files = getattr(importlib.import_module(f"ipu_pipe.{module}"), writer)(file, *written)
            args.print_progress(f"written: {', '.join(map(str, files or [file]))}")
    # after the files, as it concerns only what is printed
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
    from ipu_pipe.config.load import read_yaml
    from ipu_pipe.refusals import show_in_config

    files = [folder / "config.yaml" for folder in (run, other)]
    if not all(file.is_file() for file in files):
        return None
    # as YAML: a `Config` would refuse the keys of a run of another version
    configs = [flatten(read_yaml(file)) for file in files]
    return [
        f"{key}: {show_in_config(value)} | {show_in_config(other_value)}"
        for key, value, other_value in list_changes(*configs)
    ]


def _find_profiles(path: Path) -> list[Path]:
    """Return PopVision's profiles that a path names: the file itself, or those in a folder that has
    no trace of ours.
    """
    if path.name == PROFILE:
        return [path]
    if not path.is_dir() or (path / "config.yaml").exists() or (path / "trace").exists():
        return []
    return sorted({*path.glob(PROFILE), *path.glob(f"*/{PROFILE}")})


def _read_profile(file: Path) -> Any:
    """Return PopVision's profile, which has cycles and memory but no events. Raise `BadInput` if it
    cannot be read.
    """
    from ipu_pipe.backends.ipu.profile import read_profile

    if not file.is_file():
        raise BadInput(f"{file}: no such profile")
    # pva comes with Graphcore's SDK alone, so that there is nothing to install
    if importlib.util.find_spec("pva") is None:
        raise BadInput(
            f"{file}: is read by Graphcore's pva, which is not installed: open it with PopVision"
        )
    try:
        return read_profile(file)
    except (RuntimeError, AttributeError, ValueError, OSError) as error:
        raise BadInput(f"{file}: cannot be read by pva: {error}") from None
