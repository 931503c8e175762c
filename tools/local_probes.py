"""Probe local-parallel training: python tools/local_probes.py angles"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
import time
from pathlib import Path
from typing import Any, Callable, Dict, List, Mapping, Sequence, Tuple

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from ipu_pipe import interrupts  # noqa: E402

if __name__ == "__main__":
    interrupts.end_at_once()  # before the imports that take time

from ipu_pipe.cli.arguments import add_set, folder, say  # noqa: E402
from ipu_pipe.errors import BadInput, Parser, run_command  # noqa: E402
from ipu_pipe.files import write, write_json  # noqa: E402

CONFIG = ROOT / "configs" / "resnet20_cifar10.yaml"
# of the default config: small enough for minutes on two cores. A stage is the first convolution, or a residual block
SMALL = [
    "data.size=16",
    "stages=[layer1.0, layer1.1, layer1.2, layer2.0, layer2.1, layer2.2, layer3.0, layer3.1, layer3.2]",
    "micro_batch_size=50",
    "gradient_accumulation=1",
    "backend.threads=1",
]
OWN = {  # of the default config, by probe
    "angles": ["data.subset=4000", "steps=600"],
    "chunks": ["data.subset=2000", "data.augment=false", "steps=800"],
    "labels": ["data.subset=500", "steps=800"],
}
EPILOG = """\
examples:
  python tools/local_probes.py angles                      gradients of local methods beside backpropagation's
  python tools/local_probes.py chunks --chunks 1 5 10      greedy, blocks of 5 stages, backpropagation
  python tools/local_probes.py labels --updates 300        learning random labels, shorter
  python tools/local_probes.py filters greedy=runs/greedy whole=runs/gpipe   first layers of two runs
  python tools/local_probes.py angles --config configs/mlp_digits.yaml --set steps=200

The default model is a pre-activation ResNet-20 in 10 stages on CIFAR-10 at 16x16 (python tools/fetch_data.py cifar10 fetches it),
sized for two cores and a few minutes. --set and the options change every size; another model needs stages of its own:
--set model.entry=models.resnet:resnet18 stages=null. Of another --config the file's own sizes are taken.
Each probe's --help has its options. Exit codes: 0 done, 2 bad input, 1 fault, 130 Ctrl-C.
"""


def whole(text: str) -> int:
    """A whole number from 1."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text}: must be a whole number >= 1")
    return int(text)


def seed(text: str) -> int:
    """A whole number from 0."""
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text}: must be a whole number >= 0")
    return int(text)


def parser() -> Parser:
    """The command line."""
    p = Parser(prog="tools/local_probes.py", description="Probe local-parallel training.", epilog=EPILOG)
    probes = p.add_subparsers(dest="probe", metavar="PROBE", required=True)

    def add(name: str, says: str, *, trains: bool = True) -> argparse.ArgumentParser:
        own = probes.add_parser(name, help=says, description=says[0].upper() + says[1:] + ".")
        out = Path("docs/results/local_probes")
        own.add_argument("--out", type=folder, default=out, metavar="DIR", help="where results go (%(default)s)")
        own.add_argument("--json", action="store_true", help="print the results as JSON")
        if trains:
            own.add_argument("--config", type=Path, metavar="FILE", help=f"default: {CONFIG.relative_to(ROOT)}, small")
            add_set(own)
            own.add_argument("--updates", type=whole, metavar="N", help="of each run (default: 600 or 800)")
            own.add_argument("--jobs", type=whole, default=2, metavar="N", help="runs at a time (%(default)s)")
        return own

    own = add("angles", "angle between local and true gradients over training, by block")
    own.add_argument(
        "--method", nargs="+", default=["local_greedy", "local_overlapping"], metavar="METHOD",
        help="local methods, a panel each (%(default)s)",
    )  # fmt: skip
    own.add_argument("--every", type=whole, default=30, metavar="N", help="updates between measurements (%(default)s)")
    own.add_argument("--samples", type=whole, default=200, metavar="N", help="of the fixed batch (%(default)s)")

    own = add("chunks", "generalization gap by the number of stages in a block")
    own.add_argument("--chunks", type=whole, nargs="+", metavar="K", help="stages a block (default: 1 2 5 all)")
    own.add_argument(
        "--samples", type=whole, default=2000, metavar="N", help="evaluated, training and test (%(default)s)"
    )
    own.add_argument("--seeds", type=seed, nargs="+", metavar="S", help="default: the config's")

    own = add("labels", "training on random labels: backpropagation, chunked, greedy")
    own.add_argument("--blocks", type=whole, default=2, metavar="K", help="of the chunked method (%(default)s)")
    own.add_argument(
        "--every", type=whole, default=10, metavar="N", help="updates a point is the mean of (%(default)s)"
    )

    own = add(
        "filters", "first-layer filters as an image, each between its own least and greatest weight", trains=False
    )
    own.add_argument(
        "paths",
        nargs="+",
        metavar="TITLE=PATH",
        help="a title, if wished, and a run's or checkpoint's folder, or a state dict's file",
    )
    own.add_argument("--name", metavar="NAME", help="of the tensor, where several might be the first layer's")
    own.add_argument("--shape", type=whole, nargs=3, metavar=("C", "H", "W"), help="of a linear layer's input")
    own.add_argument(
        "--enlarge", type=whole, metavar="N", help="pixels a weight and side (default: filters of about 40)"
    )
    own.add_argument("--columns", type=whole, metavar="N", help="of the grid (default: about a square)")
    own.add_argument("--count", type=whole, default=64, metavar="N", help="the first so many filters (%(default)s)")
    return p


Result = Tuple[Dict[str, Any], Callable[[Path], None]]  # what was found, and how to draw it into a file


def main() -> None:
    """Run the command line."""
    args = parser().parse_args()
    start = time.monotonic()
    try:
        args.out.mkdir(parents=True, exist_ok=True)
        from ipu_pipe.report.plots import check_plots

        check_plots()
        found, draw = {"angles": angles, "chunks": chunks, "labels": labels, "filters": filters}[args.probe](args)
        found = {"probe": args.probe, **found, "command": _command(), "seconds": time.monotonic() - start}
        files = [write_json(args.out / f"{args.probe}.json", found), args.out / f"{args.probe}.png"]
        draw(files[1])
        if "table" in found:
            files.append(write(args.out / f"{args.probe}.md", f"Made by `{found['command']}`.\n\n{found['table']}"))
    except OSError as error:
        raise BadInput(f"--out: {args.out}: cannot be written: {error.strerror or error}") from None
    if args.json:
        print(json.dumps(found, indent=1))
    else:
        print((found["table"] + "\n" if "table" in found else "") + "where to look:\n  " + "\n  ".join(map(str, files)))


def _command() -> str:
    return "python tools/local_probes.py " + " ".join(map(shlex.quote, sys.argv[1:]))


def _config(args: argparse.Namespace) -> Any:
    from ipu_pipe.config.load import load_config

    updates = [f"steps={args.updates}"] if args.updates else []
    if args.config is not None:
        return load_config(args.config, [*updates, *args.set])
    return load_config(CONFIG, [*SMALL, *OWN[args.probe], *updates, *args.set])


def _runs(
    args: argparse.Namespace, work: Callable[..., Dict[str, Any]], runs: Mapping[str, Sequence[Any]]
) -> List[Any]:
    from ipu_pipe.studies import local_probes as lib

    say(f"{args.probe}: {len(runs)} runs, {min(args.jobs, len(runs))} at a time")
    return lib.run_in_processes(work, runs, args.jobs, say)


def angles(args: argparse.Namespace) -> Result:
    """Angles by method, block and update."""
    from ipu_pipe.studies import (
        local_probes as lib,  # holds torch, for which --help and faults of arguments must not wait
    )
    from ipu_pipe.studies import probe_pictures

    _refuse_repeated("--method", args.method)
    unknown = [name for name in args.method if name not in lib.LOCAL]
    if unknown:
        raise BadInput(f"--method: {unknown[0]}: must be one of {', '.join(lib.LOCAL)}")
    config = _config(args)
    runs = _runs(args, lib.run_angles, {name: (config, name, args.every, args.samples) for name in args.method})
    found = {
        "source": f"{lib.SOURCE}, Figure 6(a)", "config": config.to_dict(), "samples": args.samples,
        "every": args.every, "runs": runs, "table": probe_pictures.make_angles_table(runs),
    }  # fmt: skip
    return found, lambda file: probe_pictures.plot_angles(runs, config, file)


def chunks(args: argparse.Namespace) -> Result:
    """Training and test results by chunk size."""
    from ipu_pipe.studies import local_probes as lib
    from ipu_pipe.studies import probe_pictures

    config = _config(args)
    begins = lib.find_stage_begins(config)
    stages = len(begins) + 1
    sizes = args.chunks or sorted({1, *(k for k in (2, 5) if k < stages), stages})
    seeds = args.seeds or [config.seed]
    _refuse_repeated("--chunks", sizes)
    _refuse_repeated("--seeds", seeds)
    if max(sizes) > stages:
        raise BadInput(f"--chunks: {max(sizes)}: the model has {stages} stages")
    wanted = {
        f"{k} of {stages} stages a block, seed {s}": (config, begins, k, s, args.samples) for s in seeds for k in sizes
    }
    runs = _runs(args, lib.run_chunks, wanted)
    found = {
        "source": f"{lib.SOURCE}, Figure 6(b)", "config": config.to_dict(), "stages": stages, "begins": begins,
        "runs": runs, "table": probe_pictures.make_chunks_table(runs),
    }  # fmt: skip
    return found, lambda file: probe_pictures.plot_chunks(runs, config, file)


def labels(args: argparse.Namespace) -> Result:
    """Loss and accuracy on random labels by method and update."""
    from ipu_pipe.studies import local_probes as lib
    from ipu_pipe.studies import probe_pictures

    config = _config(args)
    methods: Dict[str, Dict[str, Any]] = {
        "backpropagation": {"method": "local_chunked", "method_args": {"blocks": 1}},
        f"local_chunked, {args.blocks} blocks": {"method": "local_chunked", "method_args": {"blocks": args.blocks}},
        "local_greedy": {"method": "local_greedy"},
    }
    if args.blocks == 1:
        raise BadInput("--blocks: 1: is backpropagation, which is measured anyhow: must be at least 2")
    runs = _runs(args, lib.run_labels, {name: (config, name, keys, args.every) for name, keys in methods.items()})
    found = {
        "source": f"{lib.SOURCE}, Figure 6(c)", "config": config.to_dict(), "every": args.every,
        "runs": runs, "table": probe_pictures.make_labels_table(runs),
    }  # fmt: skip
    return found, lambda file: probe_pictures.plot_labels(runs, config, file)


def filters(args: argparse.Namespace) -> Result:
    """What is shown of each checkpoint, drawn side by side."""
    from ipu_pipe.studies import probe_pictures as lib
    from ipu_pipe.studies.local_probes import SOURCE

    shown, panels, paths = [], [], []
    for text in args.paths:
        title, equals, rest = text.partition("=")
        if not equals or Path(text).exists():
            title, rest = "", text
        path, tensors = lib.read_newest_weights(Path(rest))
        name, weights = lib.find_first_layer(tensors, str(path), args.name, args.shape)
        title = title or Path(rest).stem
        panels.append((title, lib.make_filters_image(weights[: args.count], args.enlarge, args.columns)))
        paths.append(path)
        shown.append({"title": title, "weights": str(path), "tensor": name, "shape": list(weights.shape)})
    layers = ", ".join(dict.fromkeys(f"{each['tensor']} {each['shape']}" for each in shown))
    title, note = f"Filters of the first layer, {layers}", lib.describe_runs(paths)
    return {"source": f"{SOURCE}, Figure 7", "shown": shown}, lambda file: lib.draw_filters(panels, file, title, note)


def _refuse_repeated(option: str, values: Sequence[Any]) -> None:
    if len(set(values)) < len(values):
        raise BadInput(f"{option}: {' '.join(map(str, values))}: must be different")


if __name__ == "__main__":
    run_command(main)
