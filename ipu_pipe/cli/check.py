"""Check this machine: what it has, and small runs on it that must equal the emulator."""

from __future__ import annotations

import argparse
import json

from ipu_pipe.cli.arguments import COMMON, JSON, command, option, parse_file
from ipu_pipe.errors import RunFault, raise_faults

EPILOG = """
Rows 1xx run in this process, 2xx on two processes, 3xx on IPUs: there each row is an assumption about PopTorch, numbered as in
docs/results/checks.md. Rows 4xx run on XLA's devices. Rows that cannot run here are listed, not counted.
Exit code 0: all that ran are equal; 1: one differs.
No row was run on an IPU, a TPU or a Tenstorrent card before.

examples:
  python tools/check.py
  python tools/check.py --json > check.json        the report to send in
"""


@command(
    __doc__,
    EPILOG,
    JSON,
    option("--to", type=parse_file, metavar="FILE", help="also write the JSON report into FILE"),
    *COMMON,
)
def main(args: argparse.Namespace) -> None:
    """Run the command."""
    # refuse it now, not after minutes
    folder = None if args.to is None else args.to.absolute().parent
    raise_faults(
        {
            f"--to: {args.to}: no such folder {folder}": folder and not folder.is_dir(),
            f"--to: {args.to}: is a folder: must be a file": args.to and args.to.is_dir(),
        }
    )
    # import after parsing, because --help must not wait for torch
    from ipu_pipe.files import write_text
    from ipu_pipe.run.machine_check import check_machine, format_report

    report = check_machine(args.print_progress)
    text = json.dumps(report, indent=1)
    if args.to is not None:
        write_text(args.to, f"{text}\n")
    if args.json:
        print(text)
    args.print_result(format_report(report))
    # after the report, so that a failed check still leaves it
    if report["different"]:
        raise RunFault(f"{report['different']} of the runs differ from the emulator")
