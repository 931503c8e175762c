"""Compare the results of two commits: a change that only moves code must not change them. Both run here; nothing is stored.

    python tests/compare_commits.py COMMIT [--only TEXT] [--jobs 2]

runs every scene below by the command lines of COMMIT and of this checkout, in one environment with one thread, and prints each
difference: weights and optimizer state by tensor, configs, metrics and summaries without times, traces without times,
schedules, printed plans, fault lines and exit codes. It also resumes COMMIT's checkpoints by this checkout and compares the ends.
Exit code 1 if anything differs. The command lines are a contract; modules and functions are not, so nothing else is called.
"""

from __future__ import annotations

import argparse
import collections
import gzip
import hashlib
import json
import os
import re
import runpy
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Dict, Iterator, List, NamedTuple, Optional, Tuple

ROOT = Path(__file__).resolve().parents[1]
DOUBLE = ROOT / "tests" / "poptorch_double" / "path"
TIMES = re.compile(
    r"second|throughput|_ns$|^seconds$|^timed|time$|bench|^command$|^commit$|^version"
)
LIMIT = 300  # seconds of one scene


class Scene(NamedTuple):
    """A command line `argv` of tools/`tool`.py, where {run} is the scene's folder.

    `before`: command lines that run first in the same folder.
    """

    name: str
    tool: str
    argv: List[str]
    before: Tuple[List[str], ...] = ()
    double: bool = False
    processes: int = 0
    files: Tuple[Tuple[str, str], ...] = ()  # (name in {run}, text), written before


DIGITS = "configs/mlp_digits.yaml"
SMALL = [
    "steps=6",
    "evaluate={every: 1}",
    "checkpoint={every: 3}",
    "log={every: 1, tensorboard: false}",
]
RESNET = """\
model: {entry: 'models.resnet:preact_resnet20', args: {classes: 10, norm: batch}}
data: {name: synthetic, shape: [3, 8, 8], classes: 10, subset: 96, test_subset: 16}
stages: 4
micro_batch_size: 4
gradient_accumulation: 4
optimizer: {name: sgd, lr: 0.1, momentum: 0.9}
"""
METHODS = [
    "naive", "gpipe", "pipedream_flush", "pipedream", "pipedream_2bw", "pipemare", "pipelined_backprop", "spectrain",
    "local_greedy", "local_chunked", "local_overlapping", "last_layers",
]  # fmt: skip
RULES = {
    "t1": ("pipemare", "{t1: {anneal_updates: 4}}"),
    "t2": ("pipemare", "{t2: {}}"),
    "t1_t2_warmup": (
        "pipemare",
        "{t1: {anneal_updates: 4}, t2: {decay: optimal}, warmup: {epochs: 0.1}}",
    ),
    "recompute": ("pipemare", "{recompute: {segments: 2}, t2: {}}"),
    "stash": ("pipelined_backprop", "{stash: true}"),
    "dataflow": ("pipedream", "{schedule: dataflow, turn: 1}"),
    "one_f_one_b": ("pipemare", "{schedule: 1f1b}"),
    "hogwild": ("pipemare", "{hogwild: {max: 6, mean: 2}}"),
    "constant_delay": ("pipedream", "{constant_delay: {updates: 3}}"),
    "spike": ("pipelined_backprop", "{spike_compensation: {scale: 1}}"),
    "spike_ab": ("pipelined_backprop", "{spike_compensation: {a: 0.5, b: 2}}"),
    "prediction": ("pipelined_backprop", "{weight_prediction: {form: velocity, scale: 2}}"),
    "difference": ("pipelined_backprop", "{weight_prediction: {form: difference}}"),
    "both": ("pipelined_backprop", "{weight_prediction: {}, spike_compensation: {}}"),
    "shrinking": ("pipedream", "{gradient_shrinking: {factor: 0.9}}"),
}
BAD = [
    ["--set", "stages=99"], ["--set", "stages=[nowhere]"], ["--set", "method=pipdream"], ["--set", "optimizer.lr=fast"],
    ["--set", "optimzer.lr=1"], ["--set", "method_args={t2: {decay: 3}}"], ["--set", "method=gpipe", "method_args={t2: {}}"],
    ["--set", "clip={norm: 1}"], ["--set", "clip={norm: 1, scope: delayed_global}", "method=gpipe"], ["--set", "steps=0"],
    ["--set", "method=pipedream_2bw", "gradient_accumulation=2"], ["--set", "model.entry=models.mlp:mpl"],
    ["--set", "model.args={inputs: 63, width: 4, layers: 4, classes: 10}"], ["--set", "data={name: digit}"],
    ["--set", "loss=torch:nothing"], ["--set", "backend.name=distributed"], ["--set", "backend.name=poptorch"],
    ["--set", "backend={device: cuda}"], ["--set", "replicas=0"], ["--set", "method_args={blocks: 2}"],
    ["--set", "method=local_chunked", "method_args={blocks: 9}"],
    ["--set", "method=local_overlapping", "clip={norm: 1, scope: stage}"],
    ["--set", "method=last_layers", "method_args={layers: 9}"], ["--set", "method=pipemare", "recompute=true"],
    ["--set", "method=pipemare", "method_args={hogwild: {max: 1, mean: 3}}"], ["--set", "optimizer={name: adamw, lr: 0.1}",
    "method_args={spike_compensation: {}}"], ["--set", "micro_batch_size=2000"], ["--set", "lr_schedule={name: step}"],
    ["--set", "init_from=nowhere.pt"], ["--set", "nokey"], ["--resume"], ["--nothing"],
    ["--set", "optimizer.no_decay=['*.nothing']"],
    ["--set", "method=spectrain", "optimizer={name: adam, lr: 0.1}"], ["--set", "precision=float16"],
    ["--set", "method=local_greedy", "stages={count: 2, by: time}"],
]  # fmt: skip


def iterate_scenes() -> Iterator[Scene]:
    """Yield all scenes."""
    for method in METHODS:
        for P, M, N in ((1, 6, 2), (3, 8, 1), (4, 24, 4), (7, 21, 7)):
            argv = [method, "--stages", str(P), "--microbatches", str(M), "--accumulate", str(N)]
            yield Scene(f"schedule/{method}/{P}-{M}-{N}", "schedule", [*argv, "--format", "json"])
        yield Scene(
            f"schedule/{method}/text", "schedule", [method, "--stages", "4", "--microbatches", "9"]
        )
        yield Scene(
            f"dry-run/{method}", "train", [DIGITS, "--set", f"method={method}", "--dry-run"]
        )
    yield Scene(
        "schedule/csv",
        "schedule",
        ["gpipe", "--stages", "3", "--microbatches", "4", "--format", "csv"],
    )
    yield Scene(
        "schedule/csv-refused",
        "schedule",
        ["pipemare", "--stages", "3", "--microbatches", "4", "--format", "csv"],
    )
    yield from _iterate_training_scenes()
    yield from _iterate_refused_scenes()
    yield from _iterate_process_scenes()
    yield from _iterate_ipu_scenes()
    for tool in ("train", "schedule", "collect", "reproduce", "fetch_data"):
        yield Scene(f"help/{tool}", tool, ["--help"])
    yield Scene("reproduce/list", "reproduce", [])
    yield Scene(
        "collect",
        "collect",
        [DIGITS, "--methods", "gpipe,pipedream,local_greedy", "--steps", "4", "--out", "{run}"],
    )


def _make_training_scene(name: str, *settings: str, config: str = DIGITS, **more: Any) -> Scene:
    return Scene(
        f"train/{name}", "train", [config, "--out", "{run}/out", "--set", *SMALL, *settings], **more
    )


def _make_resnet_scene(name: str, *settings: str) -> Scene:
    return _make_training_scene(
        name, *settings, config="{run}/resnet.yaml", files=(("resnet.yaml", RESNET),)
    )


ADAMW = "optimizer={name: adamw, lr: 0.003, momentum: null}"


def _iterate_training_scenes() -> Iterator[Scene]:
    for method in METHODS:
        yield _make_training_scene(method, f"method={method}")
        yield _make_training_scene(
            f"{method}-adamw", f"method={method}", ADAMW, "gradient_accumulation=5", "steps=4"
        )
        if method != "local_overlapping":
            yield _make_resnet_scene(f"{method}-resnet", f"method={method}")
    for name, (method, args) in RULES.items():
        yield _make_training_scene(
            f"rule-{name}",
            f"method={method}",
            f"method_args={args}",
            "optimizer.lr=0.02",
            "gradient_accumulation=1",
        )
    yield _make_resnet_scene(
        "resnet-finest", "stages=finest", "method=pipemare", "method_args={t2: {}}"
    )
    yield _make_resnet_scene("resnet-counted", "stages={count: 3, by: parameters}", "replicas=2")
    yield _make_training_scene("clip-stage", "clip={norm: 0.1, scope: stage}")
    yield _make_training_scene("clip-delayed", "clip={norm: 0.1, scope: delayed_global}")
    yield _make_training_scene("clip-global", "method=gpipe", "clip={norm: 0.1}")
    yield _make_training_scene(
        "schedule-of-rates", "lr_schedule={name: cosine, warmup_steps: 2}", "precision=float64"
    )
    by_block = "method_args={blocks: 3, block_rates: [1, 2, 3], block_accumulation: [1, 3, 1]}"
    yield _make_training_scene("blocks", "method=local_chunked", by_block)
    scaled = "optimizer={name: sgd, lr: 0.1, momentum: 0.9, reference_batch_size: 32, no_decay: norms_and_biases}"
    yield _make_training_scene("reference", scaled)
    for method in ("pipedream", "pipemare", "gpipe", "local_greedy"):
        half = [
            DIGITS,
            "--out",
            "{run}/out",
            "--set",
            *SMALL,
            f"method={method}",
            "checkpoint={every: 3, keep: 9}",
        ]
        yield Scene(f"resume/{method}", "train", [*half, "--resume"], before=([*half, "CUT"],))


def _iterate_refused_scenes() -> Iterator[Scene]:
    for argv in BAD:
        yield Scene("bad/" + " ".join(argv), "train", [DIGITS, "--dry-run", *argv])
    texts = {
        "tag": "model: !!int abc", "list": "- 1", "syntax": "model: [", "empty": "", "nothing": "a: 1\nb: 2",
        "loop": "extends: c.yaml",
    }  # fmt: skip
    for name, text in texts.items():
        yield Scene(
            f"bad/file-{name}", "train", ["{run}/c.yaml", "--dry-run"], files=(("c.yaml", text),)
        )
    for argv in (
        ["gpip", "--stages", "2", "--microbatches", "2"],
        ["gpipe", "--stages", "0", "--microbatches", "2"],
        ["gpipe"],
    ):
        yield Scene("bad/schedule " + " ".join(argv), "schedule", argv)


def _iterate_process_scenes() -> Iterator[Scene]:
    two = ["backend.name=distributed", "stages=2"]
    for method in ("pipedream_flush", "pipedream", "pipedream_2bw", "pipemare", "local_chunked"):
        yield _make_training_scene(f"processes-{method}", f"method={method}", *two, processes=2)
    clip = "clip={norm: 0.1, scope: delayed_global}"
    yield _make_training_scene(
        "processes-t2", "method=pipemare", "method_args={t2: {}}", clip, *two, processes=2
    )
    yield _make_training_scene(
        "processes-replicas",
        "method=gpipe",
        "backend.name=distributed",
        "stages=1",
        "replicas=2",
        processes=2,
    )
    yield _make_training_scene(
        "processes-refused", "method_args={constant_delay: {updates: 1}}", *two, processes=2
    )


def _iterate_ipu_scenes() -> Iterator[Scene]:
    on = [
        "backend={name: poptorch}",
        "stages=4",
        "gradient_accumulation=8",
        "micro_batch_size=4",
        "checkpoint={every: 2}",
    ]
    for method in ("naive", "gpipe", "pipedream_flush", "local_greedy", "local_chunked"):
        yield _make_training_scene(f"ipu-{method}", f"method={method}", *on, double=True)
    yield _make_training_scene(
        "ipu-decoupled", "method=local_greedy", *on, "backend.ipu={local: decoupled}", double=True
    )
    yield _make_training_scene("ipu-refused", "method=pipedream", *on, double=True)
    yield _make_training_scene(
        "ipu-options",
        "method=gpipe",
        *on,
        "backend.ipu={device_iterations: 2, stochastic_rounding: true}",
        double=True,
    )


# ---- running a scene


def _hash_tensors(path: Path) -> Dict[str, str]:
    from safetensors.numpy import load_file

    tensors = load_file(path)
    return {
        name: f"{a.dtype} {a.shape} {hashlib.sha256(a.tobytes()).hexdigest()[:16]}"
        for name, a in tensors.items()
    }


def _drop_times(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _drop_times(v) for k, v in value.items() if not TIMES.search(str(k))}
    return [_drop_times(item) for item in value] if isinstance(value, list) else value


def _read_trace(path: Path) -> List[Any]:
    """Return the events of a trace without their times."""
    with gzip.open(path, "rt") as file:
        records = json.load(file)["traceEvents"]
    work = [r for r in records if r["ph"] == "X"]
    return sorted(
        ([r["pid"], r["tid"], r["name"], r["cat"], _drop_times(r["args"])] for r in work),
        key=json.dumps,
    )


def _read_results(run: Path, text: Any) -> Dict[str, Any]:
    """Read the files that a run wrote into its folder, without times."""
    content: Dict[str, Any] = {}
    for path in sorted(p for p in run.rglob("*") if p.is_file() and "tensorboard" not in p.parts):
        name = str(path.relative_to(run))
        if path.suffix == ".safetensors":
            content[name] = _hash_tensors(path)
        elif path.name.endswith(".json.gz"):
            content[name] = _read_trace(path)
        elif path.name in ("throughput.json", "record.json"):
            content[name] = "there"
        elif path.name == "manifest.json":  # it has hashes of files that contain times
            manifest = _drop_times(json.loads(text(path.read_text())))
            content[name] = {
                key: value
                for key, value in manifest.items()
                if key not in ("sha256", "files", "schema")
            }
        elif path.suffix == ".json":
            content[name] = _drop_times(json.loads(text(path.read_text())))
        elif path.suffix == ".jsonl":
            content[name] = [
                _drop_times(json.loads(line)) for line in path.read_text().splitlines()
            ]
        else:
            content[name] = text(path.read_text(errors="replace")).splitlines()
    return content


def _select_output_lines(text: str) -> List[str]:
    """Select the printed lines without times, progress and lines of the launcher."""
    lines = [line.rstrip() for line in text.splitlines()]
    noise = re.compile(r"^(W|E|\[W|Root Cause|Failures|=+|-+|throughput)|elastic|%\|")
    output_lines = [line for line in lines if line and not noise.search(line)]
    return [
        re.sub(r"[0-9.]+ (samples/sec|s\b|ms\b|seconds)", r"# \1", line) for line in output_lines
    ]


def make_environment(path: str) -> Dict[str, str]:
    """Return the variables of a command that imports from `path`."""
    fixed = {
        "PYTHONPATH": path,
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "COLUMNS": "140",
    }
    return {**os.environ, **fixed}


def run_scene(
    tree: Path, scene: Scene, folder: Path, checkpoints: Optional[Path] = None
) -> Dict[str, Any]:
    """Run a scene; return exit code, output and files. `checkpoints`: a run folder that replaces the runs of `before`."""
    folder.mkdir(parents=True)
    for name, text in scene.files:
        (folder / name).write_text(text)
    env = make_environment(f"{DOUBLE}{os.pathsep}{tree}" if scene.double else str(tree))

    def fill(argv: List[str]) -> List[str]:
        return [part.replace("{run}", str(folder)) for part in argv]

    if checkpoints is not None:
        shutil.copytree(checkpoints, folder / "out")
    for argv in scene.before if checkpoints is None else ():
        _run_tool(tree, scene, [part for part in fill(argv) if part != "CUT"], env)
        for late in ("step-6", "step-3/none"):
            shutil.rmtree(folder / "out" / "checkpoints" / late, ignore_errors=True)
        (folder / "out" / "summary.json").unlink()
    if scene.before:
        (folder.parent / f"{folder.name}.cut").mkdir(exist_ok=True)
        shutil.copytree(folder / "out", folder.parent / f"{folder.name}.cut" / "out")
    process = _run_tool(tree, scene, fill(scene.argv), env)

    def replace_paths(text: str) -> str:
        return (
            text.replace(str(folder), "RUN").replace(str(tree), "TREE").replace(str(ROOT), "TREE")
        )

    return {
        "exit code": process.returncode,
        "standard output": _select_output_lines(replace_paths(process.stdout)),
        "errors": [
            line
            for line in replace_paths(process.stderr).splitlines()
            if line.startswith("error: ")
        ]
        or [],
        "traceback": "Traceback" in process.stderr and scene.processes == 0,
        "files": _read_results(folder, replace_paths),
    }


def _run_tool(
    tree: Path, scene: Scene, argv: List[str], env: Dict[str, str]
) -> "subprocess.CompletedProcess[str]":
    tool = str(Path("tools") / f"{scene.tool}.py")
    command = [sys.executable, tool, *argv]
    if scene.processes:
        launcher = [
            "-m",
            "torch.distributed.run",
            "--standalone",
            f"--nproc_per_node={scene.processes}",
        ]
        command = [sys.executable, *launcher, tool, *argv]
    elif not scene.double:
        return _run_in_server(tree, tool, argv)
    return subprocess.run(command, cwd=tree, env=env, text=True, capture_output=True, timeout=LIMIT)


# ---- one server for each tree: it imports torch and ipu_pipe once and forks for each scene


class _Server:
    """A process that imports torch and the tree's package, then forks a child for each command line."""

    def __init__(self, tree: Path) -> None:
        command = [sys.executable, str(Path(__file__).resolve()), "--serve"]
        pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        self._process = subprocess.Popen(
            command, cwd=tree, env=make_environment(str(tree)), **pipes
        )

    def call(self, tool: str, argv: List[str]) -> "subprocess.CompletedProcess[str]":
        assert self._process.stdin and self._process.stdout
        self._process.stdin.write(json.dumps([tool, argv]) + "\n")
        self._process.stdin.flush()
        code, out, err = json.loads(self._process.stdout.readline())
        return subprocess.CompletedProcess([tool, *argv], code, out, err)


_servers: Dict[Tuple[str, int], _Server] = {}


def _run_in_server(tree: Path, tool: str, argv: List[str]) -> "subprocess.CompletedProcess[str]":
    import threading

    key = (str(tree), threading.get_ident())
    if key not in _servers:
        _servers[key] = _Server(tree)
    return _servers[key].call(tool, argv)


def serve() -> None:
    """Read command lines as JSON, answer each with [exit code, standard output, standard error]."""
    sys.path.insert(0, os.getcwd())
    import torch

    torch.set_num_threads(1)
    import ipu_pipe

    ipu_pipe.train  # noqa: B018  - the package imports its parts on first access
    for line in sys.stdin:
        tool, argv = json.loads(line)
        with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
            child = os.fork()
            if child == 0:
                os.dup2(out.fileno(), 1)
                os.dup2(err.fileno(), 2)
                os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
                sys.argv = [tool, *argv]
                try:
                    runpy.run_path(tool, run_name="__main__")
                    code = 0
                except SystemExit as error:
                    code = (
                        error.code if isinstance(error.code, int) else int(error.code is not None)
                    )
                except BaseException:
                    import traceback

                    traceback.print_exc()
                    code = 1
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(code)
            _, status = os.waitpid(child, 0)
            out.seek(0)
            err.seek(0)
            print(
                json.dumps([os.waitstatus_to_exitcode(status), out.read(), err.read()]), flush=True
            )


# ---- comparing


def iterate_differences(old: Any, new: Any, place: str = "") -> Iterator[str]:
    """Yield the places at which two results differ."""
    if isinstance(old, dict) and isinstance(new, dict):
        for key in sorted({*old, *new}, key=str):
            if key not in old or key not in new:
                yield f"{place}/{key}: {'only now' if key not in old else 'no longer there'}"
            else:
                yield from iterate_differences(old[key], new[key], f"{place}/{key}")
    elif isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        for i, (a, b) in enumerate(zip(old, new)):
            yield from iterate_differences(a, b, f"{place}[{i}]")
    elif old != new:
        yield f"{place}: {str(old)[:300]} -> {str(new)[:300]}"


def compare_scene(base: Path, scene: Scene, work: Path) -> Tuple[int, List[str]]:
    """Run a scene in both trees; return its exit code and the differences."""
    name = re.sub(r"[^A-Za-z0-9_.-]+", "_", scene.name)[:120]
    old = run_scene(base, scene, work / "old" / name)
    new = run_scene(ROOT, scene, work / "new" / name)
    changes = list(iterate_differences(old, new))
    if scene.before:
        checkpoints = work / "old" / f"{name}.cut" / "out"
        resumed = run_scene(ROOT, scene, work / "from_old" / name, checkpoints=checkpoints)
        changes += [
            f"resumed from the old commit's checkpoint: {d}"
            for d in iterate_differences(old["files"], resumed["files"])
        ]
    return old["exit code"], changes


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("commit", nargs="?")
    parser.add_argument("--only", default="", help="run only scenes whose names contain this text")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument(
        "--codes", action="store_true", help="print every scene's exit code, that of COMMIT"
    )
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        serve()
        return
    chosen = [scene for scene in iterate_scenes() if args.only in scene.name]
    with tempfile.TemporaryDirectory() as folder:
        work, base = Path(folder), Path(folder) / "base"
        subprocess.run(
            ["git", "-C", str(ROOT), "worktree", "add", "--detach", "-q", str(base), args.commit],
            check=True,
        )
        try:
            differing, codes = 0, collections.Counter()  # type: ignore[var-annotated]
            with ThreadPoolExecutor(args.jobs) as pool:
                for scene, (code, changes) in zip(
                    chosen, pool.map(lambda scene: compare_scene(base, scene, work), chosen)
                ):
                    differing += bool(changes)
                    codes[scene.name.partition("/")[0], code] += 1
                    if args.codes:
                        print(scene.name, code, flush=True)
                    if changes:
                        print(
                            f"{scene.name}: {len(changes)} differences",
                            *changes[:12],
                            sep="\n    ",
                            flush=True,
                        )
            print(
                "scenes by exit code:",
                ", ".join(f"{kind} {code}: {n}" for (kind, code), n in sorted(codes.items())),
            )
            print(f"{len(chosen)} scenes, {differing} differ from {args.commit}")
        finally:
            subprocess.run(
                ["git", "-C", str(ROOT), "worktree", "remove", "--force", str(base)], check=True
            )
    sys.exit(1 if differing else 0)


if __name__ == "__main__":
    main()
