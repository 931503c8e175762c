"""Write the weights of a run to a safetensors file, or in Hugging Face's layout to a folder."""

from __future__ import annotations

import argparse

from ipu_pipe.cli.arguments import COMMON, command, int_in, option, parse_file, parse_folder

EPILOG = """\
examples:
  python tools/export.py runs/digits --to model.safetensors
  python tools/export.py runs/digits --to model.safetensors --step best
  python tools/export.py runs/gpt2 --to gpt2          config.json and model.safetensors, by the model's own save_pretrained

Names are those of the model before it was split.
"""


def parse_step(text: str) -> int | str:
    """Convert an argument to a step, or best."""
    # 0: a run may be saved before its first update
    return text if text == "best" else int_in(0)(text)


@command(
    __doc__,
    EPILOG,
    option("run", type=parse_folder, metavar="RUN", help="the folder of a run, or of a checkpoint"),
    option(
        "--to",
        type=parse_file,
        required=True,
        metavar="PATH",
        help="a file that ends in .safetensors, or a new folder",
    ),
    option(
        "--step",
        type=parse_step,
        metavar="STEP",
        help="the step of the checkpoint, or best (default: the newest)",
    ),
    *COMMON,
)
def main(args: argparse.Namespace) -> None:
    """Run the command."""
    from ipu_pipe.run.export import export

    path = export(args.run, args.to, args.step)
    args.print_result(f"{args.to}: the weights of {path}")
