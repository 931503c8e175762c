"""Total against sequential cost of reaching a training loss, by local-parallel method: sweeps a perceptron on CIFAR-10."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any, Dict, List, Optional, Sequence, Tuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from ipu_pipe import interrupts  # noqa: E402

if __name__ == "__main__":
    interrupts.end_at_once()  # before the imports that take time

from ipu_pipe.cli.arguments import count, folder, positive, say, whole  # noqa: E402
from ipu_pipe.errors import BadInput, Parser, guard_writing, run_command  # noqa: E402
from ipu_pipe.files import write_json, write_text  # noqa: E402

LAYERS = 8
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
The figure's shape, not its size: the paper (Laskin et al. 2020, Figure 3) trains 8 x 4096 units on 32x32 images for three
million examples; --width 4096 --size 32 --examples 3000000 takes that, for a large machine (not run).
"""


def parser() -> Parser:
    """The command line."""
    p = Parser(prog="tools/pareto.py", description=__doc__, epilog=EPILOG)
    p.add_argument("--kinds", nargs="+", default=list(KINDS), metavar="KIND", help=f"of {', '.join(KINDS)}")
    p.add_argument("--batches", nargs="+", type=count, default=[256, 1024, 4096], metavar="B", help="(%(default)s)")
    p.add_argument(
        "--rates", nargs="+", type=positive, default=[3e-4, 1e-3, 3e-3], metavar="LR", help="of Adam (%(default)s)"
    )
    p.add_argument("--examples", type=count, default=200_000, help="examples that each run sees (%(default)s)")
    p.add_argument(
        "--width", type=whole(1, 10**5), default=256, help="units of a layer, of which there are 8 (%(default)s)"
    )
    p.add_argument("--size", type=whole(1, 1024), default=16, help="side of the images (%(default)s)")
    p.add_argument("--subset", type=count, default=10_000, help="training images (%(default)s)")
    p.add_argument("--cutoffs", nargs="+", type=positive, default=[1.7, 1.5, 1.2], metavar="LOSS", help="(%(default)s)")
    p.add_argument(
        "--jobs", type=whole(1, 1024), default=os.cpu_count() or 1, help="runs at a time (cores, %(default)s)"
    )
    p.add_argument(
        "--runs", type=folder, default=Path("runs/pareto"), metavar="DIR", help="where runs are kept (%(default)s)"
    )
    p.add_argument(
        "--out", type=folder, metavar="DIR", help="where the table, JSON and plot go (default: with the runs)"
    )
    p.add_argument("--json", action="store_true", help="print the results as JSON")
    return p


def main() -> None:
    """Run the command line."""
    args = parser().parse_args()
    for kind in args.kinds:
        if kind not in KINDS:
            raise BadInput(f"--kinds: {kind}: must be of {', '.join(KINDS)}")
    if args.examples < 2 * max(args.batches):
        raise BadInput(
            f"--examples: {args.examples}: must be at least two of the greatest --batches, {max(args.batches)}"
        )
    from ipu_pipe.studies.experiment import Request
    from ipu_pipe.studies.trained import run_grid

    experiment = _experiment(args)
    say(f"{len(experiment.rows)} runs of {args.examples} examples, {args.jobs} at a time, into {args.runs}")
    try:
        run_grid(experiment, args.runs, Request(args.runs, seeds=[0], jobs=args.jobs, say=say))
    except BadInput as error:
        raise BadInput(
            [fault.replace("--resume:", f"--runs: {args.runs}: holds other runs:") for fault in error.faults]
        ) from None
    found = _results(args)
    out = args.out or args.runs
    with guard_writing(out):
        out.mkdir(parents=True, exist_ok=True)
        write_json(out / "pareto.json", found)
        write_text(out / "table.md", _table(found, args))
        _plot(found, args, out / "pareto.png")
    print(json.dumps(found, indent=1) if args.json else _table(found, args))
    say(f"where to look: {out / 'pareto.png'}, {out / 'pareto.json'}, {out / 'table.md'}")


def _label(kind: str, batch: int, rate: float) -> str:
    return f"{kind.replace(' ', '-')}-b{batch}-lr{rate:g}"


def _experiment(args: Any) -> Any:
    from ipu_pipe.studies.trained import TrainingGrid

    base = {
        "model": {"entry": "models.mlp:mlp", "args": {"inputs": 3 * args.size**2, "width": args.width, "layers": LAYERS}},
        "data": {"name": "cifar10", "size": args.size, "augment": False, "subset": args.subset, "test_subset": 500},
        "stages": [f"fc{layer}" for layer in range(2, LAYERS + 1)],
        "optimizer": {"name": "adam"}, "evaluate": {"every": 0}, "backend": {"threads": 1}, "allow_nonfinite": True,
    }  # fmt: skip
    rows: Dict[str, Optional[Dict[str, Any]]] = {}
    for kind in args.kinds:
        method, settings, _, _ = KINDS[kind]
        for batch in args.batches:
            steps = args.examples // batch
            for rate in args.rates:
                rows[_label(kind, batch, rate)] = {
                    "method": method, "method_args": settings, "micro_batch_size": batch, "optimizer": {"lr": rate},
                    "steps": steps, "log": {"every": max(1, steps // 200)},
                }  # fmt: skip
    source = "Laskin et al. 2020, Figure 3"
    return TrainingGrid(title="Pareto fronts", source=source, base=base, seeds=[0], rows=rows)


def _costs(args: Any) -> Any:
    import torch

    from ipu_pipe.local import costs
    from ipu_pipe.local.blocks import get_blocks
    from ipu_pipe.local.structures import make_blocks
    from ipu_pipe.schedule.methods import Structure
    from models.mlp import mlp

    x = torch.zeros(2, 3, args.size, args.size)
    model = mlp(3 * args.size**2, args.width, LAYERS)
    made, _ = make_blocks(model, x, Structure(), [f"fc{layer}" for layer in range(2, LAYERS + 1)])
    blocks = get_blocks(made)
    assert blocks is not None
    return costs.count_by_paper(blocks, x, 10)


def _steps_to(folder: Path, cutoff: float) -> Optional[int]:
    """The first update at which the training loss, a mean of five lines of the log, is at most `cutoff`."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    losses = [(line["step"], line["train_loss"]) for line in lines if line.get("train_loss") is not None]
    for i in range(4, len(losses)):
        if sum(loss for _, loss in losses[i - 4 : i + 1]) / 5 <= cutoff:
            return int(losses[i][0])
    return None


def _results(args: Any) -> Dict[str, Any]:
    from ipu_pipe.local import costs

    counted = _costs(args)
    found: Dict[str, Any] = {"costs": vars(counted), "cutoffs": []}
    for cutoff in args.cutoffs:
        rows = {}
        for kind in args.kinds:
            _, _, law, k = KINDS[kind]
            points: List[Tuple[float, float]] = []
            for batch in args.batches:
                for rate in args.rates:
                    steps = _steps_to(args.runs / _label(kind, batch, rate) / "seed-0", cutoff)
                    if steps is not None:
                        spent = (counted, steps, batch, k)
                        points.append((costs.compute_sequential(law, *spent), costs.compute_total(law, *spent)))
            rows[kind] = {"points": points, "front": costs.find_front(points)}
        found["cutoffs"].append({"loss": cutoff, "kinds": rows})
    return found


def _table(found: Dict[str, Any], args: Any) -> str:
    c = found["costs"]
    lines = [
        "# Cost of reaching a training loss, by local-parallel method",
        "",
        f"Made by `python tools/pareto.py`: {LAYERS} x {args.width} perceptron, {args.subset} CIFAR-10 images of "
        f"{args.size}x{args.size}, {args.examples} examples a run, batches {', '.join(map(str, args.batches))}, Adam at "
        f"{', '.join(f'{r:g}' for r in args.rates)}; one seed. By the paper's counting f = {c['forward']:,.0f}, "
        f"x = {c['auxiliary']:,.0f}, r = {c['backward']:g}.",
        "",
        "Least sequential FLOPs (the paper's time) and least total FLOPs of any run that reached the loss; in brackets against"
        " backpropagation's.",
        "",
        "| training loss | method | runs that reached it | least sequential | least total |",
        "| --- | --- | --- | --- | --- |",
    ]  # fmt: skip
    for entry in found["cutoffs"]:
        base = entry["kinds"].get("backpropagation", {"points": []})["points"]
        for kind, row in entry["kinds"].items():
            points = row["points"]
            cells = [_least(points, base, place) for place in (0, 1)]
            lines.append(f"| {entry['loss']:g} | {kind} | {len(points)} | {cells[0]} | {cells[1]} |")
    return "\n".join(lines) + "\n"


def _least(points: Sequence[Sequence[float]], base: Sequence[Sequence[float]], place: int) -> str:
    if not points:
        return "-"
    least = min(point[place] for point in points)
    ratio = f" ({least / min(point[place] for point in base):.2f})" if base else ""
    return f"{least:.2e}{ratio}"


def _plot(found: Dict[str, Any], args: Any, file: Path) -> None:
    from matplotlib.ticker import NullFormatter

    from ipu_pipe.report.plots import open_figure

    entries = found["cutoffs"]
    title = f"Cost of reaching a training loss: a perceptron of {LAYERS} x {args.width} units by local-parallel method"
    tried = f"batches {', '.join(map(str, args.batches))}, Adam at {', '.join(f'{r:g}' for r in args.rates)}"
    note = (
        f"{args.subset:,} CIFAR-10 images of {args.size}x{args.size}, {args.examples:,} examples a run, seed 0 alone; "
        f"crosses: runs ({tried}); lines: the best of them"
    )
    with open_figure(file, (4.6, 4.4), len(entries), title=title, note=note) as panels:
        for axes, entry in zip(panels, entries):
            for number, (kind, row) in enumerate(entry["kinds"].items()):
                color = f"C{number}"
                if row["points"]:
                    axes.plot(*zip(*row["points"]), "x", color=color, markersize=4, alpha=0.6)
                    axes.plot(*zip(*row["front"]), "-", color=color, label=kind)
            axes.set(xscale="log", yscale="log", xlabel="sequential FLOPs", title=f"training loss {entry['loss']:g}")
            axes.xaxis.set_minor_formatter(NullFormatter())
            axes.yaxis.set_minor_formatter(NullFormatter())
        panels[0].set_ylabel("total FLOPs")
        panels[0].legend(fontsize=8)


if __name__ == "__main__":
    run_command(main)
