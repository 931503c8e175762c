"""Train the same by processes and by the emulator, and compare the weights bit for bit: python tools/equality.py"""

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
    interrupts.end_at_once()  # before the imports that take time

from ipu_pipe.errors import BadInput, Parser, RunFault, end_process, run_command  # noqa: E402

IMAGES = {"name": "synthetic", "shape": [3, 16, 16], "subset": 96, "test_subset": 32}
MODELS: Dict[str, Dict[str, Any]] = {
    "resnet20-batchnorm": {"model": {"entry": "models.resnet:preact_resnet20", "args": {"norm": "batch"}}, "data": IMAGES},
    "resnet20-groupnorm": {"model": {"entry": "models.resnet:preact_resnet20"}, "data": IMAGES},
    "mlp": {"model": {"entry": "models.mlp:mlp", "args": {"layers": 6}}, "data": {"name": "digits"}},
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
            "args": {"source_vocabulary": 100, "target_vocabulary": 100, "width": 32, "layers": 2, "feedforward": 32},
        },
        "data": {"name": "translation", "vocabulary": 100, "subset": 96, "test_subset": 32},
    },
}  # fmt: skip
BOTH: Dict[str, Any] = {"spike_compensation": {}, "weight_prediction": {}}
CASES: Dict[str, Dict[str, Any]] = {
    "naive": {"method": "naive"},
    "gpipe": {"method": "gpipe"},
    "pipedream_flush": {"method": "pipedream_flush"},
    "pipedream": {"method": "pipedream"},
    "pipedream_2bw": {"method": "pipedream_2bw"},
    "pipemare": {"method": "pipemare"},
    "pipemare + T1 + T2": {"method": "pipemare", "method_args": {"t1": {"anneal_updates": 4}, "t2": {}}},
    "pipemare + T2 + recompute": {"method": "pipemare", "method_args": {"t2": {}, "recompute": {"segments": 2}}},
    "pipelined_backprop": {"method": "pipelined_backprop"},
    "pipelined_backprop + SC + LWP": {"method": "pipelined_backprop", "method_args": BOTH},
    "spectrain": {"method": "spectrain"},
    "local_greedy": {"method": "local_greedy"},
    "local_chunked": {"method": "local_chunked"},
    "local_overlapping": {"method": "local_overlapping"},
    "last_layers": {"method": "last_layers"},
}
THIRD_PARTY = "third-party"  # all models of other libraries that the tests have, small and with random weights
IMPORTED = ("torch._dynamo", "ipu_pipe.run.train", "ipu_pipe.backends.processes.engine", "ipu_pipe.data.sets")
REFUSED = ".refused"
LOCAL = ("local_greedy", "local_overlapping", "last_layers")  # their blocks are the stages, one a process


def parser() -> Parser:
    """The command line."""
    p = Parser(
        prog="tools/equality.py",
        description="Train each method on each model by processes (one thread each, gloo) and by the emulator, 6 updates of 4\n"
        "microbatches, and print whether the final weights are equal bit for bit, or why processes refuse it. Takes minutes.\n"
        "Exits 1 where any differ.",
    )
    p.add_argument("--ranks", type=int, nargs="+", default=[2, 4], metavar="P", help="processes (default 2 4)")
    p.add_argument(
        "--models",
        nargs="+",
        default=list(MODELS),
        metavar="MODEL",
        help=f"of {', '.join(MODELS)}; or {THIRD_PARTY}: small models of torchvision, timm and Hugging Face"
        " (tests/third_party_models.py), with stages that begin inside their modules, or some of these by name",
    )
    p.add_argument("--cases", nargs="+", default=list(CASES), metavar="CASE", help=f"of {', '.join(CASES)}")
    p.add_argument("--precision", default="float32", metavar="P", help="of a config (default float32)")
    p.add_argument("--json", action="store_true", help="print JSON")
    return p


def main() -> None:
    """Run the command line."""
    args = parser().parse_args()
    if THIRD_PARTY in args.models:
        args.models = [name for name in args.models if name != THIRD_PARTY] + list(_third_party())
    for key, chosen, known in (("models", args.models, _known(args.models)), ("cases", args.cases, CASES)):
        for name in chosen:
            if name not in known:
                raise BadInput(f"--{key}: {name}: must be of {', '.join(known)}")
    if min(args.ranks) < 1:
        raise BadInput(f"--ranks: {min(args.ranks)}: must be at least 1")
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for ranks in args.ranks:
            pairs = [(case, model) for case in args.cases for model in args.models if _can(case, model, ranks)]
            _processes(ranks, pairs, folder, args.precision)
            rows += [_compare(case, model, ranks, folder, args.precision) for case, model in pairs]
    if args.json:
        print(json.dumps({"rows": rows}, indent=1))
    else:
        _print(rows, args.cases, args.models, args.ranks)
    if any(row["difference"] for row in rows):
        raise RunFault("not all weights are equal: see the table")


def _can(case: str, model: str, ranks: int) -> bool:
    """Whether there is such a run: the last layers and the frozen ones are two stages; a translator's decoder, and what is cut
    inside of its modules, hands on more than one activation."""
    if case == "last_layers":
        return ranks == 2 and model in MODELS
    return not ((model == "translation" or model not in MODELS) and CASES[case]["method"].startswith("local_"))


def _third_party() -> Any:
    from tests.third_party_models import CASES as models

    return models


def _known(asked: List[str]) -> List[str]:
    return [*MODELS, *(_third_party() if any(name not in MODELS for name in asked) else ())]


def _settings(case: str, model: str, ranks: int, precision: str) -> Any:
    from ipu_pipe.config.load import configure

    if model in MODELS:
        chosen: Dict[str, Any] = {**MODELS[model], "stages": ranks if case in LOCAL else None}
    else:
        own = _third_party()[model]
        chosen = {
            "model": {"entry": f"tests.third_party_models:{own.entry}"},
            "data": own.data,
            "stages": own.stages(ranks),
        }
    rate = 0.02 if model in MODELS else 0.0002  # at which none diverges with stale weights
    return configure(
        **CASES[case], **chosen,
        micro_batch_size=2, gradient_accumulation=4, steps=6,
        optimizer={"lr": rate, "momentum": 0.9}, log={"tensorboard": False}, evaluate={"subset": 32}, seed=3,
        precision=precision,
        backend={"name": "distributed", "threads": 1},
    )  # fmt: skip


def _processes(ranks: int, pairs: List[Tuple[str, str]], folder: str, precision: str) -> None:
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    context = multiprocessing.get_context("forkserver")  # which imports once for all of them
    context.set_forkserver_preload(
        [*IMPORTED, *({"tests.third_party_models"} if any(m not in MODELS for _, m in pairs) else ())]
    )
    made = [context.Process(target=_rank, args=(rank, ranks, pairs, folder, port, precision)) for rank in range(ranks)]
    for process in made:
        process.start()
    for process in made:
        process.join()
    if any(process.exitcode for process in made):
        raise RunFault(f"one of {ranks} processes failed: see above")


def _rank(rank: int, ranks: int, pairs: List[Tuple[str, str]], folder: str, port: int, precision: str) -> None:
    os.environ.update(
        RANK=str(rank), WORLD_SIZE=str(ranks), LOCAL_RANK=str(rank), MASTER_ADDR="localhost", MASTER_PORT=str(port)
    )
    from ipu_pipe.backends.processes.launch import leave
    from ipu_pipe.run.train import train

    for case, model in pairs:
        out = _folder(folder, case, model, ranks)
        try:
            train(_settings(case, model, ranks, precision), out, quiet=True)
        except BadInput as error:  # on every rank alike
            out.with_suffix(REFUSED).write_text(str(error))
    leave()
    end_process(0)


def _folder(folder: str, case: str, model: str, ranks: int) -> Path:
    return Path(folder) / f"{ranks}-{model}-{case.replace(' ', '')}"


def _compare(case: str, model: str, ranks: int, folder: str, precision: str) -> Dict[str, Any]:
    import torch
    from safetensors.torch import load_file

    from ipu_pipe.config.load import load_config
    from ipu_pipe.run.train import train

    there = _folder(folder, case, model, ranks)
    row: Dict[str, Any] = {"case": case, "model": model, "ranks": ranks}
    if there.with_suffix(REFUSED).exists():
        return {**row, "refused": there.with_suffix(REFUSED).read_text(), "difference": None, "bytes": None}
    report = json.loads((there / "summary.json").read_text())
    placed = report["stages_begin_at"]
    settings, backend = _settings(case, model, ranks, precision), load_config(there / "config.yaml").backend
    changes: Dict[str, Any] = {"backend": backend.model_copy(update={"name": "emulator"})}
    if case == "local_chunked":
        changes["method_args"] = settings.method_args.model_copy(update={"blocks": placed})
    elif case != "last_layers":
        changes["stages"] = placed
    settings = settings.model_copy(update=changes)
    here = there.with_name(there.name + "-emulator")
    train(settings, here, quiet=True)
    ours, theirs = (load_file(path / "checkpoints" / "step-6" / "model.safetensors") for path in (there, here))
    if ours.keys() != theirs.keys():
        raise RunFault(
            f"{case} on {model}, {ranks} ranks: the checkpoints hold other tensors: {sorted(ours.keys() ^ theirs.keys())}"
        )
    apart = [name for name in theirs if not torch.equal(ours[name], theirs[name])]
    gaps = [float((ours[name].double() - theirs[name].double()).abs().max()) for name in apart]
    difference = max((gap if gap > 0 else float("inf") for gap in gaps), default=0.0)  # not a number: infinite
    sent = sum(link["bytes"] for link in report["links"])
    return {**row, "refused": None, "difference": difference, "bytes": sent}


def _print(rows: List[Dict[str, Any]], cases: List[str], models: List[str], ranks: List[int]) -> None:
    columns = [(model, count) for model in models for count in ranks]
    print("| method | " + " | ".join(f"{model}, {count} ranks" for model, count in columns) + " |")
    print("| --- |" + " --- |" * len(columns))
    for case in cases:
        found = {(row["model"], row["ranks"]): _told(row) for row in rows if row["case"] == case}
        print(f"| {case} | " + " | ".join(found.get(column, "-") for column in columns) + " |")
    for row in rows:
        if row["refused"]:
            print(f"refused: {row['case']}, {row['model']}, {row['ranks']} ranks: {row['refused']}")


def _told(row: Dict[str, Any]) -> str:
    return "refused" if row["refused"] else f"differs by {row['difference']:.1e}" if row["difference"] else "equal"


if __name__ == "__main__":
    run_command(main)
