"""Pareto fronts of total and sequential cost of reaching a training loss, by local-parallel method:
python tools/pareto.py
"""

from __future__ import annotations

import json
import os
import shlex
import sys
from pathlib import Path
from typing import Any, Dict, List, Optional, Sequence, Tuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from ipu_pipe import interrupts  # noqa: E402

if __name__ == "__main__":
    interrupts.install_end_at_interrupt()  # before the imports that take time

from ipu_pipe.cli.arguments import int_in, parse_count, parse_folder, parse_positive, print_progress  # noqa: E402
from ipu_pipe.errors import BadInput, Parser, guard_writing, run_command  # noqa: E402
from ipu_pipe.files import write_json, write_text  # noqa: E402

# perceptron: layers; Transformer: blocks, and characters of a window
LAYERS, BLOCKS, CONTEXT = 8, 4, 64
# --model -> defaults of the other options
DEFAULTS: Dict[str, Dict[str, Any]] = {
    "perceptron": {
        "batches": [256, 1024, 4096],
        "rates": [3e-4, 1e-3, 3e-3],
        "examples": 200_000,
        "width": 256,
        "cutoffs": [1.7, 1.5, 1.2],
        "size": 16,
        "subset": 10_000,
    },
    "transformer": {
        "batches": [16, 64, 256],
        "rates": [1e-3, 3e-3, 1e-2],
        "examples": 16_000,
        "width": 64,
        "cutoffs": [2.6, 2.4, 2.2],
    },
}
# label -> (method of the run, its arguments, cost law, its k)
KINDS: Dict[str, Tuple[str, Dict[str, Any], str, int]] = {
    "backpropagation": ("gpipe", {}, "backpropagation", 1),
    "greedy": ("local_greedy", {}, "local_greedy", 1),
    "overlapping": ("local_overlapping", {}, "local_overlapping", 1),
    "2 chunks": ("local_chunked", {"blocks": 2}, "local_chunked", 2),
    "3 chunks": ("local_chunked", {"blocks": 3}, "local_chunked", 3),
    "last layer": ("last_layers", {"layers": 1}, "last_layers", 1),
    "last 2 layers": ("last_layers", {"layers": 2}, "last_layers", 2),
}
EPILOG = """
The figures' shape, not their size: the paper (Laskin et al. 2020, Figure 3) trains 8 x 4096 units on 32x32 images of CIFAR-10
for three million examples; --width 4096 --size 32 --examples 3000000 takes that, for a large machine (not run).
--model transformer is for Figure 4: a character Transformer of 4 blocks on Shakespeare, a block a stage.
"""


def list_defaults(name: str) -> str:
    """Return the default values of an option for both models, for its help."""
    perceptron, transformer = (
        str(row[name]).strip("[]").replace(",", "") for row in DEFAULTS.values()
    )
    return f"({perceptron}; of the transformer {transformer})"


def make_parser() -> Parser:
    """Build the parser of the command line."""
    p = Parser(prog="tools/pareto.py", description=__doc__, epilog=EPILOG)
    p.add_argument(
        "--kinds", nargs="+", default=list(KINDS), metavar="KIND", help=f"of {', '.join(KINDS)}"
    )
    p.add_argument(
        "--model",
        choices=list(DEFAULTS),
        default="perceptron",
        help="what is trained (%(default)s)",
    )
    p.add_argument(
        "--batches", nargs="+", type=parse_count, metavar="B", help=list_defaults("batches")
    )
    p.add_argument(
        "--rates",
        nargs="+",
        type=parse_positive,
        metavar="LR",
        help=f"of Adam {list_defaults('rates')}",
    )
    p.add_argument(
        "--examples",
        type=parse_count,
        help=f"examples that each run sees {list_defaults('examples')}",
    )
    p.add_argument(
        "--width", type=int_in(1, 10**5), help=f"units of a layer or block {list_defaults('width')}"
    )
    p.add_argument("--size", type=int_in(1, 1024), help="side of the perceptron's images (16)")
    p.add_argument("--subset", type=parse_count, help="the perceptron's training images (10000)")
    p.add_argument(
        "--cutoffs",
        nargs="+",
        type=parse_positive,
        metavar="LOSS",
        help=f"training losses {list_defaults('cutoffs')}",
    )
    p.add_argument(
        "--jobs",
        type=int_in(1, 1024),
        default=os.cpu_count() or 1,
        help="runs at a time (cores, %(default)s)",
    )
    p.add_argument(
        "--runs",
        type=parse_folder,
        metavar="DIR",
        help="folder of the runs (runs/pareto-MODEL-WIDTH)",
    )
    p.add_argument(
        "--out",
        type=parse_folder,
        metavar="DIR",
        help="where the table, JSON and plot go (default: with the runs)",
    )
    p.add_argument("--json", action="store_true", help="print the results as JSON")
    return p


def main() -> None:
    """Run the command line."""
    args = make_parser().parse_args()
    if args.model == "transformer" and (args.size or args.subset):
        raise BadInput("--size, --subset: belong to --model perceptron: leave them out")
    for name, value in DEFAULTS[args.model].items():
        if getattr(args, name) is None:
            setattr(args, name, value)
    args.runs = args.runs or Path(f"runs/pareto-{args.model}-{args.width}")
    for kind in args.kinds:
        if kind not in KINDS:
            raise BadInput(f"--kinds: {kind}: must be of {', '.join(KINDS)}")
    if args.examples < 2 * max(args.batches):
        raise BadInput(
            f"--examples: {args.examples}: must be at least two of the greatest --batches, "
            f"{max(args.batches)}"
        )
    from tools.experiments.experiment import Request
    from tools.experiments.training_grids import run_grid

    grid = _make_grid(args)
    print_progress(
        f"{len(grid.rows)} runs of {args.examples} examples, {args.jobs} at a time, into "
        f"{args.runs}"
    )
    try:
        run_grid(grid, args.runs, Request(args.runs, seeds=[0], jobs=args.jobs, say=print_progress))
    except BadInput as error:
        raise BadInput(
            [
                fault.replace("--resume:", f"--runs: {args.runs}: holds other runs:")
                for fault in error.faults
            ]
        ) from None
    results = _collect_results(args)
    out = args.out or args.runs
    with guard_writing(out):
        out.mkdir(parents=True, exist_ok=True)
        write_json(out / "pareto.json", results)
        write_text(out / "table.md", _format_table(results, args))
        _draw(results, args, out / "pareto.png")
    print(json.dumps(results, indent=1) if args.json else _format_table(results, args))
    print_progress(f"files: {out / 'pareto.png'}, {out / 'pareto.json'}, {out / 'table.md'}")


def _name_run(kind: str, batch: int, rate: float) -> str:
    return f"{kind.replace(' ', '-')}-b{batch}-lr{rate:g}"


def _make_grid(args: Any) -> Any:
    from tools.experiments.training_grids import TrainingGrid

    base: Dict[str, Any] = {
        "optimizer": {"name": "adam"},
        "evaluate": {"every": 0},
        "backend": {"threads": 1},
        # a rate that diverges is a run that does not reach the loss, not a fault
        "allow_nonfinite": True,
        "stages": _list_stages(args),
    }
    if args.model == "transformer":
        sizes = {
            "vocabulary": 84,
            "width": args.width,
            "heads": 4,
            "blocks": BLOCKS,
            "context": CONTEXT,
        }
        base["model"] = {"entry": "models.transformer:transformer_lm", "args": sizes}
        base["data"] = {"name": "shakespeare", "context": CONTEXT, "test_subset": 64}
    else:
        sizes = {"inputs": 3 * args.size**2, "width": args.width, "layers": LAYERS}
        base["model"] = {"entry": "models.mlp:mlp", "args": sizes}
        base["data"] = {
            "name": "cifar10",
            "size": args.size,
            "augment": False,
            "subset": args.subset,
            "test_subset": 500,
        }
    rows: Dict[str, Optional[Dict[str, Any]]] = {}
    for kind in args.kinds:
        method, settings, _, _ = KINDS[kind]
        for batch in args.batches:
            steps = args.examples // batch
            for rate in args.rates:
                rows[_name_run(kind, batch, rate)] = {
                    "method": method,
                    "method_args": settings,
                    "micro_batch_size": batch,
                    "optimizer": {"lr": rate},
                    "steps": steps,
                    "log": {"every": max(1, steps // 200)},
                }
    source = "Laskin et al. 2020, Figures 3, 4 and 8"
    return TrainingGrid(title="Pareto fronts", source=source, base=base, seeds=[0], rows=rows)


def _list_stages(args: Any) -> List[str]:
    if args.model == "transformer":
        return [f"block{number}" for number in range(2, BLOCKS + 1)]
    return [f"fc{layer}" for layer in range(2, LAYERS + 1)]


def _count_costs(args: Any) -> Any:
    import torch

    from ipu_pipe.local.blocks import get_blocks
    from ipu_pipe.local.structures import make_blocks
    from ipu_pipe.schedule.methods import Structure
    from models.mlp import mlp
    from models.transformer import transformer_lm
    from tools.experiments import costs

    if args.model == "transformer":
        model, x = (
            transformer_lm(84, args.width, 4, BLOCKS, CONTEXT),
            torch.zeros(2, CONTEXT, dtype=torch.int64),
        )
    else:
        model, x = (
            mlp(3 * args.size**2, args.width, LAYERS),
            torch.zeros(2, 3, args.size, args.size),
        )
    model_in_blocks, _ = make_blocks(model, x, Structure(), _list_stages(args))
    blocks = get_blocks(model_in_blocks)
    assert blocks is not None
    return (
        costs.count_by_paper(blocks, x, 10)
        if args.model == "perceptron"
        else costs.count_by_torch(blocks, x)
    )


def _read_losses(folder: Path) -> List[Tuple[int, float]]:
    """Return a run's (update, training loss), the loss as the mean of five lines of the log."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    losses = [
        (line["step"], line["train_loss"]) for line in lines if line.get("train_loss") is not None
    ]
    return [
        (losses[i][0], sum(loss for _, loss in losses[i - 4 : i + 1]) / 5)
        for i in range(4, len(losses))
    ]


def _collect_results(args: Any) -> Dict[str, Any]:
    from tools.experiments import costs

    counted = _count_costs(args)
    runs = {
        kind: [
            (batch, _read_losses(args.runs / _name_run(kind, batch, rate) / "seed-0"))
            for batch in args.batches
            for rate in args.rates
        ]
        for kind in args.kinds
    }
    least = {
        kind: min((loss for _, losses in of_kind for _, loss in losses), default=None)
        for kind, of_kind in runs.items()
    }
    results: Dict[str, Any] = {"costs": vars(counted), "least_losses": least, "cutoffs": []}
    for cutoff in args.cutoffs:
        rows = {}
        for kind, of_kind in runs.items():
            _, _, law, k = KINDS[kind]
            points: List[Tuple[float, float]] = []
            for batch, losses in of_kind:
                update = next((update for update, loss in losses if loss <= cutoff), None)
                if update is not None:
                    work = (counted, update, batch, k)
                    points.append(
                        (costs.compute_sequential(law, *work), costs.compute_total(law, *work))
                    )
            rows[kind] = {"points": points, "front": costs.find_front(points)}
        results["cutoffs"].append({"loss": cutoff, "kinds": rows})
    return results


def _format_table(results: Dict[str, Any], args: Any) -> str:
    counted = results["costs"]
    chosen = (
        "" if args.kinds == list(KINDS) else " --kinds " + " ".join(map(shlex.quote, args.kinds))
    )
    lines = [
        "# Cost of reaching a training loss, by local-parallel method",
        "",
        f"Made by `python tools/pareto.py --model {args.model} --width {args.width}{chosen}`: "
        f"{_describe(args)}, {args.examples} "
        f"examples a run, batches {', '.join(map(str, args.batches))}, Adam at "
        f"{', '.join(f'{r:g}' for r in args.rates)}; "
        f"one seed. By {'torch' if args.model == 'transformer' else 'the paper'}'s counting f = "
        f"{counted['forward']:,.0f}, "
        f"x = {counted['auxiliary']:,.0f}, r = {counted['backward']:g}.",
        "",
        "Least sequential FLOPs (the paper's time) and least total FLOPs of any run that reached "
        "the loss; in brackets against"
        " backpropagation's, if it was run.",
        "",
        "| training loss | method | runs that reached it | least sequential | least total |",
        "| --- | --- | --- | --- | --- |",
    ]
    for entry in results["cutoffs"]:
        base = entry["kinds"].get("backpropagation", {"points": []})["points"]
        for kind, row in entry["kinds"].items():
            points = row["points"]
            sequential, total = (_format_least(points, base, axis) for axis in (0, 1))
            lines.append(f"| {entry['loss']:g} | {kind} | {len(points)} | {sequential} | {total} |")
    lines += [
        "",
        "Least training loss of any run, like those above the mean of five lines of the log, each "
        "of one update:",
        "",
        "| method | loss |",
        "| --- | --- |",
    ]
    for kind, loss in results["least_losses"].items():
        lines.append(f"| {kind} | {'-' if loss is None else format(loss, '.3f')} |")
    return "\n".join(lines) + "\n"


def _describe(args: Any) -> str:
    if args.model == "transformer":
        return (
            f"a Transformer of {BLOCKS} blocks of width {args.width}, windows of {CONTEXT} "
            f"characters of Shakespeare"
        )
    return (
        f"a perceptron of {LAYERS} x {args.width} units, {args.subset:,} CIFAR-10 images of "
        f"{args.size}x{args.size}"
    )


def _format_least(
    points: Sequence[Sequence[float]], base: Sequence[Sequence[float]], axis: int
) -> str:
    if not points:
        return "-"
    least = min(point[axis] for point in points)
    ratio = f" ({least / min(point[axis] for point in base):.2f})" if base else ""
    return f"{least:.2e}{ratio}"


def _draw(results: Dict[str, Any], args: Any, file: Path) -> None:
    from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter

    from ipu_pipe.report.plots import open_figure

    entries = results["cutoffs"]
    title = "Cost of reaching a training loss, by local-parallel method"
    tried = (
        f"batches {', '.join(map(str, args.batches))}, Adam at "
        f"{', '.join(f'{r:g}' for r in args.rates)}"
    )
    note = (
        f"{_describe(args)}, {args.examples:,} examples a run, seed 0 alone; "
        f"crosses: runs ({tried}); dots and lines: the best of them"
    )
    with open_figure(file, (4.6, 4.4), len(entries), title=title, note=note) as panels:
        for axes, entry in zip(panels, entries):
            for number, (kind, row) in enumerate(entry["kinds"].items()):
                color = f"C{number}"
                if row["points"]:
                    axes.plot(*zip(*row["points"]), "x", color=color, markersize=4, alpha=0.6)
                    axes.plot(*zip(*row["front"]), "o-", markersize=4, color=color, label=kind)
            axes.set(
                xscale="log",
                yscale="log",
                xlabel="sequential FLOPs",
                title=f"training loss {entry['loss']:g}",
            )
            for axis in (axes.xaxis, axes.yaxis):
                axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
                axis.set_major_formatter(StrMethodFormatter("{x:.0e}"))
                axis.set_minor_formatter(NullFormatter())
        panels[0].set_ylabel("total FLOPs")
        panels[0].legend(fontsize=8)


if __name__ == "__main__":
    run_command(main)
