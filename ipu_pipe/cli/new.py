"""Write a commented config for a model of your own on given hardware, which `rehearse` accepts."""

from __future__ import annotations

import argparse
from pathlib import Path
from shlex import quote

from ipu_pipe.cli.arguments import COMMON, command, int_in, option, parse_counts, parse_file
from ipu_pipe.config.values import MOST_STAGES
from ipu_pipe.errors import BadInput

EPILOG = """
The model is run once, for its classes. The planner chooses stages (unless the model has begin_stage marks), replicas and
microbatches; all of it is predicted. Random samples stand in for your data, and a comment says where yours go.
Nothing here was run on an IPU.

examples:
  python tools/new.py mine:Net --hardware pod16 --out mine.yaml
  python tools/new.py mine:Net --hardware pod4 --shape 3,32,32 --stages 4 --batch 256
"""
# samples of an update, as of configs/pod
BATCH = 1024


@command(
    __doc__,
    EPILOG,
    option("model", metavar="MODULE:MODEL", help="its import string, from the current folder too"),
    option(
        "--hardware",
        required=True,
        metavar="NAME|FILE",
        help="a name in configs/hardware/, such as pod16, or a YAML file",
    ),
    option(
        "--shape",
        type=parse_counts,
        default=(3, 224, 224),
        metavar="N,...",
        help="the shape of a sample (default: 3,224,224)",
    ),
    option(
        "--stages",
        type=int_in(1, MOST_STAGES),
        metavar="P",
        help="number of stages (default: the model's marks, else the fastest)",
    ),
    option(
        "--batch",
        type=int_in(1, 10**6),
        default=BATCH,
        metavar="SAMPLES",
        help="the most samples of an update (default %(default)s)",
    ),
    option(
        "--out",
        type=parse_file,
        metavar="FILE",
        help="the config to write (default: MODEL_NAME.yaml)",
    ),
    option("--overwrite", action="store_true", help="replace FILE if it exists"),
    *COMMON,
)
def main(args: argparse.Namespace) -> None:
    """Run the command."""
    out = args.out or Path(
        # stem: the hardware may be a file
        f"{args.model.rpartition(':')[2].lower()}_{Path(args.hardware).stem}.yaml"
    )
    # before the model is run and planned, which takes long
    if out.exists() and not args.overwrite:
        raise BadInput(f"--out: {out}: exists already: use another name, or --overwrite")
    # import after parsing, because --help must not wait for torch
    from ipu_pipe.files import write_text
    from ipu_pipe.run.proposal import Wish, suggest_config
    from ipu_pipe.shipped import name_commands

    text = suggest_config(Wish(args.model, args.hardware, args.shape, args.batch, args.stages))
    write_text(out, text)
    args.print_progress(
        f"written: {out}; rehearse it, try three updates here, train on the devices:"
    )
    # a name may have spaces
    file = quote(str(out))
    run, trial = (quote(f"runs/{out.stem}{end}") for end in ("", "_try"))
    train = f"python tools/train.py {file} --out"
    here = "backend.name=emulator steps=3"
    if "name: poptorch" in text:
        # the emulator has neither options of IPUs nor precisions in bits
        here += " backend.ipu=null precision=float32"
    commands = f"python tools/rehearse.py {file}\n{train} {trial} --set {here}\n{train} {run}"
    args.print_result(name_commands(commands))
