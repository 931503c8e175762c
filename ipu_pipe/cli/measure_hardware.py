"""Measure how fast this machine computes, copies and sends, and write a hardware description:
`--hardware this` then reads it (with --out FILE, `--hardware FILE`). Run it on an idle machine."""

from __future__ import annotations

import argparse
from pathlib import Path

from ipu_pipe.cli.arguments import QUIET, command, int_in, option, parse_file
from ipu_pipe.config.values import MOST_THREADS
from ipu_pipe.errors import BadInput, guard_writing, raise_faults
from ipu_pipe.files import write_text


@command(
    __doc__,
    "",
    option(
        "--out",
        type=parse_file,
        metavar="FILE",
        help="YAML file to write (default: this machine's, in the user's cache)",
    ),
    option(
        "--threads",
        type=int_in(1, MOST_THREADS),
        default=1,
        metavar="N",
        help="threads of each device's process (default 1)",
    ),
    option(
        "--device",
        default="cpu",
        metavar="KIND",
        help="device: cpu (each device is a process), or cuda or another kind that torch has here "
        "(not tested on any)",
    ),
    option(
        "--seconds",
        type=float,
        default=0.3,
        metavar="S",
        help="minimum time of each measurement (default 0.3)",
    ),
    QUIET,
)
def main(args: argparse.Namespace) -> None:
    """Run the command."""
    from ipu_pipe.hardware.description import find_this_file, read_hardware

    out: Path = args.out or find_this_file()
    raise_faults(
        {
            # not 0 < x refuses nan, which every comparison denies
            f"--seconds: {args.seconds}: must be a number > 0 and <= 60": not 0
            < args.seconds
            <= 60,
            f"--out: {out}: must be a YAML file, so that --hardware takes it for one": out.suffix
            not in (".yaml", ".yml"),
            f"--out: {out}: no such folder {out.parent}": args.out
            and not out.absolute().parent.is_dir(),
        }
    )

    # import after parsing, because --help must not wait for torch
    from ipu_pipe.config.load import dump_yaml
    from ipu_pipe.hardware.measuring import measure
    from ipu_pipe.model.devices import get_kind, list_accelerators

    kind = get_kind(args.device)
    if not kind.is_available():
        what = "GPU" if kind.is_cuda else "such device"
        known = " or ".join(["cpu", *(one.name for one in list_accelerators())])
        raise BadInput(f"--device: {args.device}: this PyTorch finds no {what}: must be {known}")
    text = dump_yaml(measure(args.threads, args.device, args.seconds))
    # the user's cache may not exist yet; the folder of --out was looked for above
    with guard_writing(out):
        out.parent.mkdir(parents=True, exist_ok=True)
    write_text(out, text)
    # read back from the file: these are the figures that plans will have
    args.print_result("\n".join([*read_hardware(str(out)).format_figures(), f"written: {out}"]))
