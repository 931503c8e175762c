"""Comparison of processes, emulator and a plain loop on many models of other libraries: python
tools/sweep.py
"""

from __future__ import annotations

import json
import multiprocessing
import os
import socket
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any, Callable, Dict, List, Tuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from ipu_pipe import interrupts  # noqa: E402

if __name__ == "__main__":
    interrupts.install_end_at_interrupt()  # before the imports that take time

from ipu_pipe.errors import BadInput, Divergence, Parser, RunFault, end_process, run_command  # noqa: E402
from ipu_pipe.files import write_json, write_text  # noqa: E402

METHODS = ("gpipe", "zb_h1", "pipedream", "pipedream_2bw", "pipemare")
UPDATES, ACCUMULATE, SEED, RATE, MOMENTUM = 3, 2, 3, 1e-3, 0.9
PRELOADED = [
    "torch._dynamo",
    "ipu_pipe.run.train",
    "ipu_pipe.backends.processes.engine",
    "tests.third_party_zoo",
]
LOST = 20.0  # seconds that the other rank has to end after one has failed


def make_parser() -> Parser:
    """Build the parser of the command line."""
    p = Parser(
        prog="tools/sweep.py",
        description="Train small models of torchvision, timm and transformers "
        "(tests/third_party_zoo.py) for 3 updates of\n"
        "2 microbatches, cut into two stages: on two processes, on the emulator, and in a plain "
        "loop over the uncut model.\n"
        "Compare weights, buffers and evaluations bit for bit. Exit 1 if any differ or a run "
        "fails.",
    )
    p.add_argument("--models", nargs="+", metavar="MODEL", help="models to train (default: all)")
    p.add_argument(
        "--out",
        type=Path,
        metavar="DIR",
        help="write results.json and table.md here, after every model",
    )
    p.add_argument(
        "--limit",
        type=float,
        default=300,
        metavar="SECONDS",
        help="time limit of a model (default 300)",
    )
    return p


def main() -> None:
    """Run the command line."""
    args = make_parser().parse_args()
    from ipu_pipe.report.provenance import name_commit
    from tests.third_party_zoo import MODELS

    unknown = [name for name in args.models or () if name not in MODELS]
    if unknown:
        raise BadInput(f"--models: {', '.join(unknown)}: must be of {', '.join(MODELS)}")
    path, versions, commit = (
        args.out and args.out / "results.json",
        _read_versions(),
        name_commit(Path(__file__).parent),
    )
    earlier = json.loads(path.read_text()) if path and path.is_file() else {}
    is_same = earlier.get("versions", versions) == versions
    if args.models and not is_same:
        raise BadInput(
            f"--out: {args.out}: has rows of other versions ({earlier['versions']}): run all "
            f"models, or use another"
        )
    rows, commits = (earlier.get(key, {}) if is_same else {} for key in ("rows", "commits"))
    is_wrong = False
    for name in args.models or MODELS:
        rows[name], commits[name] = _run_model(name, args.limit), commit
        print(
            f"{name}: "
            + "; ".join(f"{method}: {' / '.join(pair)}" for method, pair in rows[name].items()),
            flush=True,
        )
        verdicts = [verdict for pair in rows[name].values() for verdict in pair]
        is_wrong |= not all(
            verdict.startswith(("equal", "refused", "diverged", "-")) for verdict in verdicts
        )
        if path:
            ordered = {model: rows[model] for model in MODELS if model in rows}
            args.out.mkdir(parents=True, exist_ok=True)
            write_json(path, {"versions": versions, "commits": commits, "rows": ordered})
            write_text(args.out / "table.md", format_table(json.loads(path.read_text())))
    if is_wrong:
        raise RunFault("not all runs are equal: see above")


def _read_versions() -> Dict[str, str]:
    """Return the versions of the libraries."""
    from importlib.metadata import distributions

    from tests.vision_libraries import ASIDE

    versions = {}
    for name in ("torch", "torchvision", "timm", "transformers"):
        versions[name] = next(iter(distributions(name=name, path=[*sys.path, str(ASIDE)]))).version
    return versions


# ---- one model


def _run_model(name: str, limit: float) -> Dict[str, List[str]]:
    """Return for each method two verdicts: of the emulator against the plain loop, of processes
    against the emulator.
    """
    with tempfile.TemporaryDirectory() as temporary:
        folder, until, todo = Path(temporary), time.monotonic() + limit, list(METHODS)
        while todo:  # a run that fails ends its processes: the methods after it get new ones
            with socket.socket() as free:
                # port 0 is any free one
                free.bind(("localhost", 0))
                port = free.getsockname()[1]
            _run_in_processes(
                [(_train_as_rank, (rank, port, name, todo, folder)) for rank in range(2)], until
            )
            _remove_finished(todo, folder, ".processes")
        todo = list(METHODS)
        while todo:
            _run_in_processes([(_compare_all, (name, todo, folder))], until)
            _remove_finished(todo, folder, ".verdicts")
        return {
            method: json.loads((folder / method).with_suffix(".verdicts").read_text())
            for method in METHODS
        }


def _remove_finished(todo: List[str], folder: Path, suffix: str) -> None:
    """Remove the methods with a result from `todo`, and the next one, which has failed: write its
    verdict.
    """
    while todo and (folder / todo[0]).with_suffix(suffix).exists():
        (folder / todo.pop(0)).with_suffix(".error").unlink(
            missing_ok=True
        )  # of a rank that another one has ended
    if todo:
        error = (folder / todo[0]).with_suffix(".error")
        why = error.read_text() if error.exists() else "out of time, or killed"
        error.unlink(missing_ok=True)
        verdict: Any = (
            {"verdict": f"failed: {why}"} if suffix == ".processes" else [f"failed: {why}", "-"]
        )
        (folder / todo.pop(0)).with_suffix(suffix).write_text(json.dumps(verdict))


def _run_in_processes(
    works: List[Tuple[Callable[..., None], Tuple[Any, ...]]], until: float
) -> None:
    """Run each function in a process of its own until the deadline; kill what is left."""
    context = multiprocessing.get_context(
        "forkserver"
    )  # imports the libraries once for all processes
    context.set_forkserver_preload(PRELOADED)
    processes = [context.Process(target=_run_one, args=work) for work in works]
    for process in processes:
        process.start()
    while any(process.is_alive() for process in processes) and time.monotonic() < until:
        if any(process.exitcode for process in processes):
            until = min(until, time.monotonic() + LOST)
        time.sleep(0.02)
    for process in processes:
        process.kill()
        process.join()


def _run_one(work: Callable[..., None], arguments: Tuple[Any, ...]) -> None:
    """Call `work` quietly on one thread."""
    import warnings

    import torch

    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    work(*arguments)
    end_process(0)


def _train(
    name: str, method: str, stages: Any, backend: str, out: Path
) -> Tuple[Any, Dict[str, Any]]:
    """Train the model by the method. Return it and the run's summary."""
    from ipu_pipe.run.train import train

    model, arguments = _prepare(name)
    summary = train(
        _make_config(method, stages, backend), out, model=model, quiet=True, **arguments
    )
    return model, summary


def _prepare(name: str) -> Tuple[Any, Dict[str, Any]]:
    """Build the model, and the other arguments of `train` and `build`."""
    import torch

    from tests.third_party_zoo import MODELS, make_zoo_source

    torch.manual_seed(0)
    case = MODELS[name]
    return case.build(), {
        "data": make_zoo_source(case),
        "loss": case.loss,
        "output": case.output,
    }


def _make_config(method: str, stages: Any, backend: str) -> Any:
    """Return the config of a run."""
    from ipu_pipe.config.load import configure

    return configure(
        method=method,
        stages=stages,
        micro_batch_size=2,
        gradient_accumulation=ACCUMULATE,
        steps=UPDATES,
        seed=SEED,
        optimizer={"name": "sgd", "lr": RATE, "momentum": MOMENTUM},
        checkpoint=None,
        log={"tensorboard": False, "trace": False},
        backend={"name": backend, "threads": 1, "deadline": 60},
    )


def _train_as_rank(rank: int, port: int, name: str, methods: List[str], folder: Path) -> None:
    """Train by each method as one of two ranks; rank 0 stores weights, evaluation and stages, or
    why it is refused.
    """
    import torch

    os.environ.update(
        RANK=str(rank),
        WORLD_SIZE="2",
        LOCAL_RANK=str(rank),
        MASTER_ADDR="localhost",
        MASTER_PORT=str(port),
    )
    from ipu_pipe.backends.processes.launch import leave

    for method in methods:
        path = folder / method
        try:
            model, summary = _train(name, method, 2, "distributed", folder / f"{method}-run")
            result = {"stages": summary["stages_begin_at"], "final": summary["final"]}
            if rank == 0:
                torch.save(model.state_dict(), path.with_suffix(".pt"))
        except BadInput as error:  # every rank raises the same
            result = {"verdict": f"refused: {error}"}
        except Divergence as error:
            path.with_suffix(".processes").write_text(json.dumps({"verdict": f"differs: {error}"}))
            end_process(1)
        except Exception as error:
            path.with_suffix(".error").write_text(_describe(error))
            end_process(1)
        if rank == 0:
            path.with_suffix(".processes").write_text(json.dumps(result))
    leave()


def _compare_all(name: str, methods: List[str], folder: Path) -> None:
    """Train by each method on the emulator and in the plain loop, and write both verdicts."""
    import torch

    for method in methods:
        path = folder / method
        processes = json.loads(path.with_suffix(".processes").read_text())
        stages = processes.get("stages", 2)
        try:
            model, summary = _train(name, method, stages, "emulator", folder / f"{method}-emulator")
        except BadInput as error:
            verdicts = [
                f"refused: {error}",
                processes.get("verdict", "differs: processes do not refuse"),
            ]
        except Divergence as error:
            verdicts = judge_divergence(str(error), processes.get("verdict", ""))
        except Exception as error:
            path.with_suffix(".error").write_text(_describe(error))
            end_process(1)
        else:
            state = model.state_dict()
            verdicts = [
                _compare(state, _train_plainly(name, method, stages)),
                processes.get("verdict", ""),
            ]
            if not verdicts[1]:
                verdicts[1] = _compare(torch.load(path.with_suffix(".pt")), state)
                if verdicts[1] == "equal" and processes["final"] != json.loads(
                    json.dumps(summary["final"])
                ):
                    verdicts[1] = (
                        f"differs: evaluated to {processes['final']}, on the emulator to "
                        f"{summary['final']}"
                    )
        path.with_suffix(".verdicts").write_text(json.dumps(verdicts))


def judge_divergence(fault: str, processes: str) -> List[str]:
    """Return both verdicts where the emulator ended with a loss that is not finite; `processes`:
    theirs, "" if they trained.
    """
    is_same = processes.partition(";")[0] == f"differs: {fault}".partition(";")[0]
    return [
        f"diverged: {fault}",
        "-" if is_same else processes or "differs: processes do not diverge",
    ]


def _train_plainly(name: str, method: str, stages: Any) -> Dict[str, Any]:
    """Train the uncut model microbatch by microbatch, each pass with copies of the weights that its
    method's versions name.

    The library says which versions, which microbatches and which dropout masks; weights, gradients
    and updates are PyTorch's.
    """
    import torch
    from torch.func import functional_call

    from ipu_pipe.model.randomness import KeyedRandomness
    from ipu_pipe.run.build import build

    model, arguments = _prepare(name)
    job = build(_make_config(method, stages, "emulator"), model, **arguments)
    parameters, stage_of = dict(model.named_parameters()), job.partition.stage_of()
    optimizer = torch.optim.SGD(parameters.values(), lr=RATE, momentum=MOMENTUM)
    draws = KeyedRandomness(model, job.effects.draws, SEED, torch.device("cpu"))
    history = [{name: p.detach().clone() for name, p in parameters.items()}]
    for m in range(UPDATES * ACCUMULATE):
        forward, backward = (versions[:, 0].tolist() for versions in job.table.window(m, m + 1))
        weights = {
            name: history[forward[stage_of[name]]][name].clone().requires_grad_(p.requires_grad)
            for name, p in parameters.items()
        }
        x, y = job.split_batch(arguments["data"].train_batch(0, m, 2))
        with draws.forward(m):
            output = functional_call(
                model,
                weights,
                () if isinstance(x, dict) else (x,),
                x if isinstance(x, dict) else {},
            )
        loss = arguments["loss"](arguments["output"](output), y) / ACCUMULATE
        for name, weight in weights.items():
            # by .data, so that autograd does not refuse a backward with other weights
            weight.data.copy_(history[backward[stage_of[name]]][name])
        with draws.backward(m):
            loss.backward()
        for name, weight in weights.items():
            if weight.grad is not None:
                so_far = parameters[name].grad
                parameters[name].grad = weight.grad if so_far is None else so_far + weight.grad
        if (m + 1) % ACCUMULATE == 0:
            optimizer.step()
            optimizer.zero_grad()
            history.append({name: p.detach().clone() for name, p in parameters.items()})
    return dict(model.state_dict())


def _compare(ours: Dict[str, Any], theirs: Dict[str, Any]) -> str:
    """Return "equal" if the two states are so bit for bit, else the number that differ and by how
    much.
    """
    import torch

    if ours.keys() != theirs.keys():
        return f"differs: other tensors: {sorted(ours.keys() ^ theirs.keys())}"
    if not all(torch.isfinite(value).all() for value in ours.values() if value.is_floating_point()):
        return "differs: a weight is not finite"
    different = [name for name, value in theirs.items() if not torch.equal(ours[name], value)]
    if not different:
        return "equal"
    gap = max(
        float((ours[name].double() - theirs[name].double()).abs().max()) for name in different
    )
    return (
        f"differs: {len(different)} of {len(ours)} tensors, by up to {gap:.1e}, the first "
        f"{different[0]}"
    )


def _describe(error: BaseException) -> str:
    """Return the type, message and place of an exception."""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return (
        f"{type(error).__name__}: {str(error)[:300]} ({Path(frame.filename).name}:{frame.lineno})"
    )


# ---- the table


def format_table(results: Dict[str, Any]) -> str:
    """Format the results as a page: counts, a row per model, and the reason of each refusal or
    difference.
    """
    rows: Dict[str, Dict[str, List[str]]] = results["rows"]
    cells = [pair for row in rows.values() for pair in row.values()]
    counts = [
        sum(verdict.startswith(word) for verdict in side)
        for side in zip(*cells)
        for word in ("equal", "refused")
    ]
    lines = [
        "# Models of other libraries, by method",
        "",
        f"{len(rows)} models, {len(METHODS)} methods, {len(cells)} runs: the emulator equals the "
        f"plain loop in {counts[0]} and"
        f" refuses {counts[1]}; two processes equal the emulator in {counts[2]} and refuse "
        f"{counts[3]}.",
        "",
        "Versions: "
        + ", ".join(f"{name} {version}" for name, version in results["versions"].items())
        + ".",
        "",
        "| model | " + " | ".join(METHODS) + " |",
        "| --- |" + " --- |" * len(METHODS),
    ]
    reasons: Dict[Tuple[str, str, str], List[str]] = {}
    for name, row in rows.items():
        shown = []
        for method, pair in row.items():
            words = [verdict.partition(":")[0] for verdict in pair]
            shown.append("equal" if words == ["equal", "equal"] else f"{words[0]} / {words[1]}")
            for backend, verdict in zip(("emulator", "processes"), pair):
                if verdict not in ("equal", "-"):
                    reasons.setdefault((name, backend, verdict), []).append(method)
        lines.append(f"| {name} | " + " | ".join(shown) + " |")
    lines += [
        "",
        "`a / b`: a of the emulator against the plain loop, b of processes against the emulator.",
        "",
    ]
    for (name, backend, verdict), methods in reasons.items():
        by = "all methods" if len(methods) == len(METHODS) else ", ".join(methods)
        lines.append(f"- {name}, {backend}, {by}: {verdict}".replace("\n", " "))
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    run_command(main)
