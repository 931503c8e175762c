"""Probes of local-parallel training: python tools/local_probes.py angles"""

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
# Changes to the default config, so that a run takes minutes on two cores. A stage is the first convolution or a residual block.
SMALL = [
    "data.size=16",
    "stages=[layer1.0, layer1.1, layer1.2, layer2.0, layer2.1, layer2.2, layer3.0, layer3.1, layer3.2]",
    "micro_batch_size=50",
    "gradient_accumulation=1",
    "backend.threads=1",
]
CHANGES_BY_PROBE = {  # further changes to the default config
    "angles": ["data.subset=4000", "steps=600"],
    "chunks": ["data.subset=2000", "data.augment=false", "steps=800"],
    "labels": ["data.subset=500", "steps=800"],
}
EPILOG = """\
examples:
  python tools/local_probes.py angles                      compare gradients of local methods with the true ones
  python tools/local_probes.py chunks --chunks 1 5 10      greedy, blocks of 5 stages, backpropagation
  python tools/local_probes.py labels --updates 300        learning random labels, shorter
  python tools/local_probes.py filters greedy=runs/greedy whole=runs/gpipe   first layers of two runs
  python tools/local_probes.py angles --config configs/mlp_digits.yaml --set steps=200

The default model is a pre-activation ResNet-20 in 10 stages on CIFAR-10 at 16x16, sized for a few minutes on two cores. Fetch the
data with python tools/fetch_data.py cifar10. --set and the options change every size; another model needs its own stages:
--set model.entry=models.resnet:resnet18 stages=null. With --config, the sizes are those of the file.
Each probe's --help lists its options. Exit codes: 0 done, 2 bad input, 1 fault, 130 Ctrl-C.
"""


def parse_count(text: str) -> int:
    """Return the integer >= 1 that `text` spells; raise `ArgumentTypeError` if it spells none."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text}: must be a whole number >= 1")
    return int(text)


def parse_seed(text: str) -> int:
    """Return the integer >= 0 that `text` spells; raise `ArgumentTypeError` if it spells none."""
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text}: must be a whole number >= 0")
    return int(text)


def make_parser() -> Parser:
    """Build the parser of the command line."""
    p = Parser(prog="tools/local_probes.py", description="Probe local-parallel training.", epilog=EPILOG)
    probes = p.add_subparsers(dest="probe", metavar="PROBE", required=True)

    def add(name: str, summary: str, *, trains: bool = True) -> argparse.ArgumentParser:
        """Add a probe with the options that all probes have; `trains`: also those of its runs."""
        probe = probes.add_parser(name, help=summary, description=summary[0].upper() + summary[1:] + ".")
        out = Path("docs/results/local_probes")
        probe.add_argument("--out", type=folder, default=out, metavar="DIR", help="folder of the results (%(default)s)")
        probe.add_argument("--json", action="store_true", help="print the results as JSON")
        if trains:
            probe.add_argument(
                "--config", type=Path, metavar="FILE", help=f"default: {CONFIG.relative_to(ROOT)}, made small"
            )
            add_set(probe)
            probe.add_argument(
                "--updates", type=parse_count, metavar="N", help="updates of each run (default: 600 or 800)"
            )
            probe.add_argument(
                "--jobs", type=parse_count, default=2, metavar="N", help="runs in parallel (%(default)s)"
            )
        return probe

    probe = add("angles", "angle between local and true gradients over training, by block")
    probe.add_argument(
        "--method", nargs="+", default=["local_greedy", "local_overlapping"], metavar="METHOD",
        help="local methods, one panel each (%(default)s)",
    )  # fmt: skip
    probe.add_argument(
        "--every", type=parse_count, default=30, metavar="N", help="updates between measurements (%(default)s)"
    )
    probe.add_argument(
        "--samples", type=parse_count, default=200, metavar="N", help="samples of the fixed batch (%(default)s)"
    )

    probe = add("chunks", "generalization gap by the number of stages in a block")
    probe.add_argument(
        "--chunks", type=parse_count, nargs="+", metavar="K", help="stages per block (default: 1 2 5 all)"
    )
    probe.add_argument(
        "--samples",
        type=parse_count,
        default=2000,
        metavar="N",
        help="training and test samples to evaluate (%(default)s)",
    )
    probe.add_argument(
        "--seeds", type=parse_seed, nargs="+", metavar="S", help="seeds of the runs (default: the config's)"
    )

    probe = add("labels", "training on random labels: backpropagation, chunked, greedy")
    probe.add_argument(
        "--blocks", type=parse_count, default=2, metavar="K", help="blocks of the chunked method (%(default)s)"
    )
    probe.add_argument(
        "--every", type=parse_count, default=10, metavar="N", help="updates averaged for each point (%(default)s)"
    )

    probe = add(
        "filters", "first-layer filters as an image, each scaled from its least to its greatest weight", trains=False
    )
    probe.add_argument(
        "paths",
        nargs="+",
        metavar="TITLE=PATH",
        help="an optional title, and the folder of a run or checkpoint, or the file of a state dict",
    )
    probe.add_argument("--name", metavar="NAME", help="name of the tensor, where several might be the first layer's")
    probe.add_argument(
        "--shape", type=parse_count, nargs=3, metavar=("C", "H", "W"), help="input shape of a linear layer"
    )
    probe.add_argument(
        "--enlarge", type=parse_count, metavar="N", help="side of a weight in pixels (default: for filters of about 40)"
    )
    probe.add_argument("--columns", type=parse_count, metavar="N", help="columns of the grid (default: about a square)")
    probe.add_argument(
        "--count", type=parse_count, default=64, metavar="N", help="show the first N filters (%(default)s)"
    )
    return p


Result = Tuple[Dict[str, Any], Callable[[Path], None]]  # the results, and a function that draws them into a file


def main() -> None:
    """Run the command line."""
    args = make_parser().parse_args()
    start = time.monotonic()
    try:
        args.out.mkdir(parents=True, exist_ok=True)
        from ipu_pipe.report.plots import check_plots

        check_plots()
        probes = {"angles": probe_angles, "chunks": probe_chunks, "labels": probe_labels, "filters": probe_filters}
        results, draw = probes[args.probe](args)
        results = {"probe": args.probe, **results, "command": _format_command(), "seconds": time.monotonic() - start}
        files = [write_json(args.out / f"{args.probe}.json", results), args.out / f"{args.probe}.png"]
        draw(files[1])
        if "table" in results:
            files.append(write(args.out / f"{args.probe}.md", f"Made by `{results['command']}`.\n\n{results['table']}"))
    except OSError as error:
        raise BadInput(f"--out: {args.out}: cannot be written: {error.strerror or error}") from None
    if args.json:
        print(json.dumps(results, indent=1))
    else:
        print(
            (results["table"] + "\n" if "table" in results else "")
            + "where to look:\n  "
            + "\n  ".join(map(str, files))
        )


def _format_command() -> str:
    return "python tools/local_probes.py " + " ".join(map(shlex.quote, sys.argv[1:]))


def _load_config(args: argparse.Namespace) -> Any:
    from ipu_pipe.config.load import load_config

    updates = [f"steps={args.updates}"] if args.updates else []
    if args.config is not None:
        return load_config(args.config, [*updates, *args.set])
    return load_config(CONFIG, [*SMALL, *CHANGES_BY_PROBE[args.probe], *updates, *args.set])


def _run_in_processes(
    args: argparse.Namespace, work: Callable[..., Dict[str, Any]], runs: Mapping[str, Sequence[Any]]
) -> List[Any]:
    from ipu_pipe.studies import local_probes as lib

    say(f"{args.probe}: {len(runs)} runs, {min(args.jobs, len(runs))} at a time")
    return lib.run_in_processes(work, runs, args.jobs, say)


def probe_angles(args: argparse.Namespace) -> Result:
    """Measure the angle between local and true gradients by method, block and update."""
    # imported here, since it imports torch, for which --help and faults of arguments must not wait
    from ipu_pipe.studies import local_probes as lib
    from ipu_pipe.studies import probe_pictures

    _refuse_repeated("--method", args.method)
    unknown = [name for name in args.method if name not in lib.LOCAL]
    if unknown:
        raise BadInput(f"--method: {unknown[0]}: must be one of {', '.join(lib.LOCAL)}")
    config = _load_config(args)
    runs = _run_in_processes(
        args, lib.run_angles, {name: (config, name, args.every, args.samples) for name in args.method}
    )
    results = {
        "source": f"{lib.SOURCE}, Figure 6(a)", "config": config.to_dict(), "samples": args.samples,
        "every": args.every, "runs": runs, "table": probe_pictures.make_angles_table(runs),
    }  # fmt: skip
    return results, lambda file: probe_pictures.plot_angles(runs, config, file)


def probe_chunks(args: argparse.Namespace) -> Result:
    """Measure training and test results by the number of stages in a block."""
    from ipu_pipe.studies import local_probes as lib
    from ipu_pipe.studies import probe_pictures

    config = _load_config(args)
    begins = lib.find_stage_begins(config)
    stages = len(begins) + 1
    sizes = args.chunks or sorted({1, *(k for k in (2, 5) if k < stages), stages})
    seeds = args.seeds or [config.seed]
    _refuse_repeated("--chunks", sizes)
    _refuse_repeated("--seeds", seeds)
    if max(sizes) > stages:
        raise BadInput(f"--chunks: {max(sizes)}: the model has {stages} stages")
    arguments = {
        f"{k} of {stages} stages a block, seed {s}": (config, begins, k, s, args.samples) for s in seeds for k in sizes
    }
    runs = _run_in_processes(args, lib.run_chunks, arguments)
    results = {
        "source": f"{lib.SOURCE}, Figure 6(b)", "config": config.to_dict(), "stages": stages, "begins": begins,
        "runs": runs, "table": probe_pictures.make_chunks_table(runs),
    }  # fmt: skip
    return results, lambda file: probe_pictures.plot_chunks(runs, config, file)


def probe_labels(args: argparse.Namespace) -> Result:
    """Measure loss and accuracy on random labels by method and update."""
    from ipu_pipe.studies import local_probes as lib
    from ipu_pipe.studies import probe_pictures

    config = _load_config(args)
    methods: Dict[str, Dict[str, Any]] = {
        "backpropagation": {"method": "local_chunked", "method_args": {"blocks": 1}},
        f"local_chunked, {args.blocks} blocks": {"method": "local_chunked", "method_args": {"blocks": args.blocks}},
        "local_greedy": {"method": "local_greedy"},
    }
    if args.blocks == 1:
        raise BadInput("--blocks: 1: is backpropagation, which is measured anyhow: must be at least 2")
    runs = _run_in_processes(
        args, lib.run_labels, {name: (config, name, keys, args.every) for name, keys in methods.items()}
    )
    results = {
        "source": f"{lib.SOURCE}, Figure 6(c)", "config": config.to_dict(), "every": args.every,
        "runs": runs, "table": probe_pictures.make_labels_table(runs),
    }  # fmt: skip
    return results, lambda file: probe_pictures.plot_labels(runs, config, file)


def probe_filters(args: argparse.Namespace) -> Result:
    """Draw the first-layer filters of each checkpoint side by side."""
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
    layers = ", ".join(dict.fromkeys(f"{panel['tensor']} {panel['shape']}" for panel in shown))
    title, note = f"Filters of the first layer, {layers}", lib.describe_runs(paths)
    return {"source": f"{SOURCE}, Figure 7", "shown": shown}, lambda file: lib.draw_filters(panels, file, title, note)


def _refuse_repeated(option: str, values: Sequence[Any]) -> None:
    """Raise `BadInput` if a value occurs twice."""
    if len(set(values)) < len(values):
        raise BadInput(f"{option}: {' '.join(map(str, values))}: must be different")


if __name__ == "__main__":
    run_command(main)
