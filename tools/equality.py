"""Bitwise comparison of weights trained by processes and by the emulator: python
tools/equality.py
"""

from __future__ import annotations

import json
import multiprocessing
import os
import socket
import sys
import tempfile
from pathlib import Path
from typing import Any, Dict, List, Tuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from ipu_pipe import interrupts  # noqa: E402

if __name__ == "__main__":
    interrupts.install_end_at_interrupt()  # before the imports that take time

from ipu_pipe.errors import BadInput, Parser, RunFault, end_process, run_command  # noqa: E402

IMAGES = {"name": "synthetic", "shape": [3, 16, 16], "subset": 96, "test_subset": 32}
MODELS: Dict[str, Dict[str, Any]] = {
    "resnet20-batchnorm": {
        "model": {"entry": "models.resnet:preact_resnet20", "args": {"norm": "batch"}},
        "data": IMAGES,
    },
    "resnet20-groupnorm": {"model": {"entry": "models.resnet:preact_resnet20"}, "data": IMAGES},
    "mlp": {
        "model": {"entry": "models.mlp:mlp", "args": {"layers": 8}},
        "data": {"name": "digits"},
    },
    "transformer": {
        "model": {
            "entry": "models.transformer:transformer_lm",
            "args": {"vocabulary": 84, "width": 32, "context": 16, "dropout": 0.1},
        },
        "data": {"name": "shakespeare", "context": 16, "subset": 96, "test_subset": 32},
    },
    "translation": {
        "model": {
            "entry": "models.transformer:transformer_translation",
            "args": {
                "source_vocabulary": 100,
                "target_vocabulary": 100,
                "width": 32,
                "layers": 2,
                "feedforward": 32,
            },
        },
        "data": {"name": "translation", "vocabulary": 100, "subset": 96, "test_subset": 32},
    },
}
BOTH: Dict[str, Any] = {"spike_compensation": {}, "weight_prediction": {}}
CASES: Dict[str, Dict[str, Any]] = {
    "naive": {"method": "naive"},
    "gpipe": {"method": "gpipe"},
    "pipedream_flush": {"method": "pipedream_flush"},
    "pipedream": {"method": "pipedream"},
    "pipedream_2bw": {"method": "pipedream_2bw"},
    "pipemare": {"method": "pipemare"},
    "pipemare + T1 + T2": {
        "method": "pipemare",
        "method_args": {"t1": {"anneal_updates": 4}, "t2": {}},
    },
    "pipemare + T2 + recompute": {
        "method": "pipemare",
        "method_args": {"t2": {}, "recompute": {"segments": 2}},
    },
    "pipelined_backprop": {"method": "pipelined_backprop"},
    "pipelined_backprop + SC + LWP": {"method": "pipelined_backprop", "method_args": BOTH},
    "spectrain": {"method": "spectrain"},
    "interleaved_1f1b": {"method": "interleaved_1f1b", "stages_per_device": 2},
    "zb_h1": {"method": "zb_h1"},
    "interleaved_zb": {"method": "interleaved_zb", "stages_per_device": 2},
    "zbv": {"method": "zbv"},
    "dualpipe_v": {"method": "dualpipe_v"},
    "pipedream, 2 stages a process": {"method": "pipedream", "stages_per_device": 2},
    "pipedream + split backwards": {"method": "pipedream", "method_args": {"split_backward": True}},
    "pipelined_backprop + split backwards": {
        "method": "pipelined_backprop",
        "method_args": {"split_backward": True},
    },
    "local_greedy": {"method": "local_greedy"},
    "local_chunked": {"method": "local_chunked"},
    "local_overlapping": {"method": "local_overlapping"},
    "last_layers": {"method": "last_layers"},
}
THIRD_PARTY = "third-party"  # stands for all third-party models of the tests, which are small and have random weights
IMPORTED = (
    "torch._dynamo",
    "ipu_pipe.run.train",
    "ipu_pipe.backends.processes.engine",
    "ipu_pipe.data.sets",
)
REFUSED = ".refused"
# the blocks of the local ones are the stages; 2BW needs as many microbatches per update as stages
ONE_STAGE_A_PROCESS = ("pipedream_2bw", "local_greedy", "local_overlapping", "last_layers")
TWO_STAGES_A_PROCESS = (
    "interleaved_1f1b",
    "interleaved_zb",
    "zbv",
    "dualpipe_v",
    "pipedream, 2 stages a process",
)


def make_parser() -> Parser:
    """Build the parser of the command line."""
    p = Parser(
        prog="tools/equality.py",
        description="Train each method on each model by processes (one thread each, gloo) and by "
        "the emulator, for 6 updates of\n"
        "4 microbatches (dualpipe_v: as many as stages). Print whether the final weights are equal "
        "bit for bit, or why the\n"
        "processes refuse the run. Takes minutes. Exit 1 if any weights differ.",
    )
    p.add_argument(
        "--ranks", type=int, nargs="+", default=[2, 4], metavar="P", help="processes (default 2 4)"
    )
    p.add_argument(
        "--models",
        nargs="+",
        default=list(MODELS),
        metavar="MODEL",
        help=f"models to train: {', '.join(MODELS)} (default: all of these); {THIRD_PARTY}: small "
        f"models of torchvision, timm and"
        " Hugging Face (tests/third_party_models.py), with stages that begin inside their modules; "
        "or some of these by name",
    )
    p.add_argument(
        "--cases",
        nargs="+",
        default=list(CASES),
        metavar="CASE",
        help=f"methods (default: all): {', '.join(CASES)}",
    )
    p.add_argument(
        "--precision",
        default="float32",
        metavar="P",
        help="precision of the config (default float32)",
    )
    p.add_argument("--json", action="store_true", help="print JSON")
    return p


def main() -> None:
    """Run the command line."""
    args = make_parser().parse_args()
    if THIRD_PARTY in args.models:
        args.models = [name for name in args.models if name != THIRD_PARTY] + list(
            _import_third_party()
        )
    for key, chosen, known in (
        ("models", args.models, _list_models(args.models)),
        ("cases", args.cases, CASES),
    ):
        for name in chosen:
            if name not in known:
                raise BadInput(f"--{key}: {name}: must be of {', '.join(known)}")
    if min(args.ranks) < 1:
        raise BadInput(f"--ranks: {min(args.ranks)}: must be at least 1")
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for ranks in args.ranks:
            pairs = [
                (case, model)
                for case in args.cases
                for model in args.models
                if _can_run(case, model, ranks)
            ]
            _train_in_processes(ranks, pairs, folder, args.precision)
            rows += [_compare(case, model, ranks, folder, args.precision) for case, model in pairs]
    if args.json:
        print(json.dumps({"rows": rows}, indent=1))
    else:
        _print_table(rows, args.cases, args.models, args.ranks)
    if any(row["difference"] for row in rows):
        raise RunFault("not all weights are equal: see the table")


def _can_run(case: str, model: str, ranks: int) -> bool:
    """Return whether the method can train the model on `ranks` processes.

    `last_layers` has two stages: the frozen layers and the trained ones. Local methods need a
    single activation between stages; the decoder of the translation model, and models with stages
    that begin inside their modules, pass on more.
    """
    if case == "last_layers":
        return ranks == 2 and model in MODELS
    return not (
        (model == "translation" or model not in MODELS)
        and CASES[case]["method"].startswith("local_")
    )


def _import_third_party() -> Any:
    """Return the third-party models of the tests, by name; only here are their libraries
    imported.
    """
    from tests.third_party_models import CASES as models

    return models


def _list_models(asked: List[str]) -> List[str]:
    """List the names that --models takes; those of third-party models only if `asked` has one that
    is not built in.
    """
    return [*MODELS, *(_import_third_party() if any(name not in MODELS for name in asked) else ())]


def _make_config(case: str, model: str, ranks: int, precision: str) -> Any:
    """Return the config of a run on processes."""
    from ipu_pipe.config.load import configure

    if model in MODELS:
        stages = (
            ranks
            if case in ONE_STAGE_A_PROCESS
            else 2 * ranks
            if case in TWO_STAGES_A_PROCESS
            else None
        )
        chosen: Dict[str, Any] = {**MODELS[model], "stages": stages}
    else:
        third_party = _import_third_party()[model]
        chosen = {
            "model": {"entry": f"tests.third_party_models:{third_party.entry}"},
            "data": third_party.data,
            "stages": third_party.list_stages(ranks),
        }
    rate = (
        0.02 if model in MODELS else 0.0002
    )  # none diverges at these rates, even with stale weights
    return configure(
        **CASES[case],
        **chosen,
        micro_batch_size=2,
        gradient_accumulation=2 * ranks if case == "dualpipe_v" else 4,
        steps=6,
        optimizer={"lr": rate, "momentum": 0.9},
        log={"tensorboard": False},
        evaluate={"subset": 32},
        seed=3,
        precision=precision,
        backend={"name": "distributed", "threads": 1},
    )


def _train_in_processes(
    ranks: int, pairs: List[Tuple[str, str]], folder: str, precision: str
) -> None:
    """Train each pair of case and model on `ranks` new processes; raise `RunFault` if a process
    fails.
    """
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    context = multiprocessing.get_context(
        "forkserver"
    )  # imports the modules below once for all processes
    context.set_forkserver_preload(
        [
            *IMPORTED,
            *({"tests.third_party_models"} if any(m not in MODELS for _, m in pairs) else ()),
        ]
    )
    processes = [
        context.Process(target=_run_rank, args=(rank, ranks, pairs, folder, port, precision))
        for rank in range(ranks)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    if any(process.exitcode for process in processes):
        raise RunFault(f"one of {ranks} processes failed: see above")


def _run_rank(
    rank: int, ranks: int, pairs: List[Tuple[str, str]], folder: str, port: int, precision: str
) -> None:
    """Train each pair as one rank of the process group."""
    os.environ.update(
        RANK=str(rank),
        WORLD_SIZE=str(ranks),
        LOCAL_RANK=str(rank),
        MASTER_ADDR="localhost",
        MASTER_PORT=str(port),
    )
    from ipu_pipe.backends.processes.launch import leave
    from ipu_pipe.run.train import train

    for case, model in pairs:
        out = _make_path(folder, case, model, ranks)
        try:
            train(_make_config(case, model, ranks, precision), out, quiet=True)
        except BadInput as error:  # every rank raises the same
            out.with_suffix(REFUSED).write_text(str(error))
    leave()
    end_process(0)


def _make_path(folder: str, case: str, model: str, ranks: int) -> Path:
    """Return the output folder of a run."""
    return Path(folder) / f"{ranks}-{model}-{case.replace(' ', '')}"


def _compare(case: str, model: str, ranks: int, folder: str, precision: str) -> Dict[str, Any]:
    """Train the run of the processes on the emulator too, and return how the final weights
    differ.
    """
    import torch
    from safetensors.torch import load_file

    from ipu_pipe.config.load import load_config
    from ipu_pipe.run.train import train

    of_processes = _make_path(folder, case, model, ranks)
    row: Dict[str, Any] = {"case": case, "model": model, "ranks": ranks}
    if of_processes.with_suffix(REFUSED).exists():
        return {
            **row,
            "refused": of_processes.with_suffix(REFUSED).read_text(),
            "difference": None,
            "bytes": None,
        }
    summary = json.loads((of_processes / "summary.json").read_text())
    boundaries = summary["stages_begin_at"]
    settings, backend = (
        _make_config(case, model, ranks, precision),
        load_config(of_processes / "config.yaml").backend,
    )
    changes: Dict[str, Any] = {"backend": backend.model_copy(update={"name": "emulator"})}
    if case == "local_chunked":
        changes["method_args"] = settings.method_args.model_copy(update={"blocks": boundaries})
    elif case != "last_layers":
        changes["stages"] = boundaries
    settings = settings.model_copy(update=changes)
    of_emulator = of_processes.with_name(of_processes.name + "-emulator")
    train(settings, of_emulator, quiet=True)
    ours, theirs = (
        load_file(path / "checkpoints/step-6/model.safetensors")
        for path in (of_processes, of_emulator)
    )
    if ours.keys() != theirs.keys():
        raise RunFault(
            f"{case} on {model}, {ranks} ranks: the checkpoints hold other tensors: "
            f"{sorted(ours.keys() ^ theirs.keys())}"
        )
    different = [name for name in theirs if not torch.equal(ours[name], theirs[name])]
    gaps = [float((ours[name].double() - theirs[name].double()).abs().max()) for name in different]
    difference = max(
        (gap if gap > 0 else float("inf") for gap in gaps), default=0.0
    )  # a NaN counts as infinite
    sent = sum(link["bytes"] for link in summary["links"])
    return {**row, "refused": None, "difference": difference, "bytes": sent}


def _print_table(
    rows: List[Dict[str, Any]], cases: List[str], models: List[str], ranks: List[int]
) -> None:
    """Print a Markdown table, a row per method, and the reasons of refused runs."""
    columns = [(model, count) for model in models for count in ranks]
    print("| method | " + " | ".join(f"{model}, {count} ranks" for model, count in columns) + " |")
    print("| --- |" + " --- |" * len(columns))
    for case in cases:
        cells = {
            (row["model"], row["ranks"]): _format_result(row) for row in rows if row["case"] == case
        }
        print(f"| {case} | " + " | ".join(cells.get(column, "-") for column in columns) + " |")
    for row in rows:
        if row["refused"]:
            print(f"refused: {row['case']}, {row['model']}, {row['ranks']} ranks: {row['refused']}")


def _format_result(row: Dict[str, Any]) -> str:
    """Format a cell of the table."""
    return (
        "refused"
        if row["refused"]
        else f"differs by {row['difference']:.1e}"
        if row["difference"]
        else "equal"
    )


if __name__ == "__main__":
    run_command(main)
