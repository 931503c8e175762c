"""Rehearse a run without its devices and data: judge the config as it stands, run two small updates
on the emulator, and say whether it fits.
"""

from __future__ import annotations

import argparse

from ipu_pipe.cli.arguments import COMMON, CONFIG, command
from ipu_pipe.errors import BadInput

EPILOG = """
Memory, times and samples/s are predicted in the config's own precision, on its hardware; nothing here was run on an IPU.
The emulator trains in float32 on the CPU, with random data of the set's shape where its folder is missing, and a small batch.
Faults, and a stage that needs more memory than its device has, are one line each and exit code 2.

examples:
  python tools/rehearse.py configs/pod/pod16_resnet50_pipelined.yaml
  python tools/rehearse.py configs/pod/pod16_resnet50_pipelined.yaml --set stages=8 replicas=2
"""


@command(__doc__, EPILOG, *CONFIG, *COMMON)
def main(args: argparse.Namespace) -> None:
    """Run the command."""
    # import after parsing, because --help must not wait for torch
    from ipu_pipe.config.load import load_config
    from ipu_pipe.run.rehearsal import rehearse

    rehearsal = rehearse(load_config(args.config, args.set), args.print_progress)
    # first: the text has each stage's memory, by which a misfit can be mended
    args.print_result(rehearsal.text)
    if rehearsal.misfit is not None:
        raise BadInput(f"hardware: {rehearsal.misfit}")
