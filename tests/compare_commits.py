"""Compare the results of two commits: a change that only moves code must not change them. Both run here; nothing is stored.

    python tests/compare_commits.py COMMIT [--only TEXT] [--jobs 2]

runs every scene below by the command lines of COMMIT and of this checkout, in one environment with one thread, and prints each
difference: weights and optimizer state by tensor, configs, metrics and summaries without times, traces without times,
schedules, printed plans, fault lines and exit codes. It also resumes COMMIT's checkpoints by this checkout and compares the ends.
Exit code 1 if anything differs. The command lines are a contract; modules and functions are not, so nothing else is called.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Callable, Dict, Iterator, List, Mapping, NamedTuple, Optional, Sequence

from safetensors.numpy import load_file

ROOT = Path(__file__).resolve().parents[1]
DOUBLE = ROOT / "tests" / "poptorch_double" / "path"
TIMES = re.compile(
    r"second|throughput|_ns$|^seconds$|^timed|time$|bench|^command$|^commit$|^version|^bubble|^utilization"
)
NOISE = re.compile(r"^(W|E|\[W|Root Cause|Failures|=+|-+|throughput)|elastic|%\|")
MEASURED = re.compile(r"[0-9.]+ ?(samples/sec|s\b|ms\b|seconds|% measured)")
LIMIT = 300  # seconds of one command


class Scene(NamedTuple):
    """A command line `argv` of tools/`tool`.py, where {run} is the scene's folder.

    `files`: name in {run} -> text, written before. `resumes`: the run is cut off after half of its updates, and goes on.
    `double`: beside the double of PopTorch.
    """

    name: str
    tool: str
    argv: Sequence[str]
    files: Mapping[str, str] = {}
    resumes: bool = False
    double: bool = False
    processes: int = 0


DIGITS = "configs/mlp_digits.yaml"
SMALL = [
    "steps=6",
    "evaluate={every: 1}",
    "checkpoint={every: 3, keep: 9}",
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
ADAMW = "optimizer={name: adamw, lr: 0.003, momentum: null}"
RULES = [
    ("pipemare", "{t1: {anneal_updates: 4}, t2: {decay: optimal}, warmup: {epochs: 0.1}}"),
    ("pipemare", "{recompute: {segments: 2}, t2: {}}"),
    ("pipelined_backprop", "{stash: true}"),
    ("pipedream", "{schedule: dataflow, turn: 1}"),
    ("pipemare", "{schedule: 1f1b}"),
    ("pipemare", "{hogwild: {max: 6, mean: 2}}"),
    ("pipedream", "{constant_delay: {updates: 3}}"),
    ("pipelined_backprop", "{spike_compensation: {a: 0.5, b: 2}}"),
    ("pipelined_backprop", "{weight_prediction: {form: difference}}"),
    ("pipelined_backprop", "{weight_prediction: {}, spike_compensation: {}}"),
    ("pipedream", "{gradient_shrinking: {factor: 0.9}}"),
]
# settings of further runs, of the digits or of the small ResNet
RUNS = [
    ["clip={norm: 0.1, scope: stage}"],
    ["clip={norm: 0.1, scope: delayed_global}"],
    ["clip={norm: 0.1}", "method=gpipe"],
    ["lr_schedule={name: cosine, warmup_steps: 2}", "precision=float64"],
    [
        "method_args={blocks: 3, block_rates: [1, 2, 3], block_accumulation: [1, 3, 1]}",
        "method=local_chunked",
    ],
    [
        "optimizer={name: sgd, lr: 0.1, momentum: 0.9, reference_batch_size: 32, no_decay: norms_and_biases}"
    ],
]
RESNET_RUNS = [
    ["stages=finest", "method=pipemare", "method_args={t2: {}}"],
    ["stages={count: 3, by: parameters}", "replicas=2"],
]
PROCESS_RUNS = [
    *[[f"method={name}"] for name in ("pipedream", "pipedream_2bw", "pipemare", "local_chunked")],
    ["method=pipemare", "method_args={t2: {}}", "clip={norm: 0.1, scope: delayed_global}"],
    ["method=gpipe", "stages=1", "replicas=2"],
    ["method_args={constant_delay: {updates: 1}}"],
]
IPU_RUNS = [
    *[[f"method={name}"] for name in ("naive", "gpipe", "local_greedy", "pipedream")],
    ["method=local_greedy", "backend.ipu={local: decoupled}"],
    ["method=gpipe", "backend.ipu={device_iterations: 2, stochastic_rounding: true}"],
]
# of each kind of fault one
BAD = [
    ["nokey"], ["optimzer.lr=1"], ["optimizer.lr=fast"], ["stages=99"], ["stages=[nowhere]"], ["steps=0"],
    ["method=pipdream"], ["method=gpipe", "method_args={t2: {}}"], ["clip={norm: 1}"], ["model.entry=models.mlp:mpl"],
    ["model.args={inputs: 63, width: 4, layers: 4, classes: 10}"], ["data={name: digit}"], ["loss=torch:nothing"],
    ["backend.name=distributed"], ["backend={device: cuda}"], ["micro_batch_size=2000"], ["init_from=nowhere.pt"],
    ["optimizer.no_decay=['*.nothing']"],
]  # fmt: skip
BAD_FILES = ["model: !!int abc", "- 1", "model: [", "", "a: 1\nb: 2", "extends: c.yaml"]


def iterate_scenes() -> Iterator[Scene]:
    """Yield all scenes."""
    for method in METHODS:
        shape = ["--stages", "4", "--microbatches", "24", "--accumulate", "4"]
        for form in ("json", "text", "csv"):
            argv = [method, *shape, "--format", form]
            yield Scene(f"schedule/{method}/{form}", "schedule", argv)
        argv = [DIGITS, "--set", f"method={method}", "--dry-run"]
        yield Scene(f"dry-run/{method}", "train", argv)
        yield _make_training_scene(f"method={method}")
        yield _make_training_scene(
            f"method={method}", ADAMW, "gradient_accumulation=5", resumes=True
        )
        yield _make_resnet_scene(f"method={method}")
    for method, args in RULES:
        settings = ["optimizer.lr=0.02", "gradient_accumulation=1"]
        yield _make_training_scene(f"method={method}", f"method_args={args}", *settings)
    for settings in RUNS:
        yield _make_training_scene(*settings)
    for settings in RESNET_RUNS:
        yield _make_resnet_scene(*settings)
    for settings in PROCESS_RUNS:
        on_processes = ["backend.name=distributed", "stages=2", *settings]
        yield _make_training_scene(*on_processes, processes=2)
    for settings in IPU_RUNS:
        on_ipus = ["backend={name: poptorch}", "stages=4", "gradient_accumulation=8", *settings]
        yield _make_training_scene(*on_ipus, double=True)
    for settings in BAD:
        argv = [DIGITS, "--dry-run", "--set", *settings]
        yield Scene("bad/" + " ".join(settings), "train", argv)
    for text in BAD_FILES:
        files = {"c.yaml": text}
        yield Scene(f"bad/file {text}", "train", ["{run}/c.yaml", "--dry-run"], files)
    yield Scene("bad/schedule", "schedule", ["gpipe"])
    for tool in ("train", "schedule", "collect", "reproduce", "fetch_data"):
        yield Scene(f"help/{tool}", tool, ["--help"])
    argv = ["--methods", "gpipe,pipedream,local_greedy", "--steps", "4", "--out", "{run}"]
    yield Scene("collect", "collect", [DIGITS, *argv])


def _make_training_scene(*settings: str, config: str = DIGITS, **more: Any) -> Scene:
    argv = [config, "--out", "{run}/out", "--set", *SMALL, *settings]
    return Scene(" ".join([f"train/{Path(config).stem}", *settings]), "train", argv, **more)


def _make_resnet_scene(*settings: str) -> Scene:
    files = {"resnet.yaml": RESNET}
    return _make_training_scene(*settings, config="{run}/resnet.yaml", files=files)


# ---- running a scene


def _hash_tensors(path: Path) -> Dict[str, str]:
    return {
        name: f"{a.dtype} {a.shape} {hashlib.sha256(a.tobytes()).hexdigest()[:16]}"
        for name, a in load_file(path).items()
    }


def _drop_times(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _drop_times(v) for k, v in value.items() if not TIMES.search(str(k))}
    return [_drop_times(item) for item in value] if isinstance(value, list) else value


def _read_trace(path: Path) -> List[Any]:
    """Return the events of a trace without their times."""
    records = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    keys = ("pid", "tid", "name", "cat", "args")
    work = [[_drop_times(r[key]) for key in keys] for r in records if r["ph"] == "X"]
    return sorted(work, key=json.dumps)


def _read_file(path: Path, replace_paths: Callable[[str], str]) -> Any:
    """Read a file of a run, without times."""
    if path.suffix == ".safetensors":
        return _hash_tensors(path)
    if path.name.endswith(".json.gz"):
        return _read_trace(path)
    if path.name in ("throughput.json", "record.json") or path.suffix == ".trace":
        return "there"
    text = replace_paths(path.read_text(errors="replace"))
    if path.suffix == ".json":
        content = _drop_times(json.loads(text))
        # a manifest has hashes of files that contain times
        hashes = ("sha256", "files", "schema") if path.name == "manifest.json" else ()
        return {key: value for key, value in content.items() if key not in hashes}
    if path.suffix == ".jsonl":
        return [_drop_times(json.loads(line)) for line in text.splitlines()]
    return text.splitlines()


def run_scene(
    tree: Path, scene: Scene, folder: Path, checkpoints: Optional[Path] = None
) -> Dict[str, Any]:
    """Run a scene; return exit code, output and files. `checkpoints`: a run that was cut off, which replaces that of a scene
    that resumes."""
    folder.mkdir(parents=True)
    for name, text in scene.files.items():
        (folder / name).write_text(text)
    argv = [part.replace("{run}", str(folder)) for part in scene.argv]
    if scene.resumes and checkpoints is None:
        _run_tool(tree, scene, argv)
        checkpoints = find_cut(folder)
        shutil.move(folder / "out", checkpoints)
        shutil.rmtree(checkpoints / "checkpoints" / "step-6")
        (checkpoints / "summary.json").unlink()
    if checkpoints is not None:
        shutil.copytree(checkpoints, folder / "out")
        argv.append("--resume")
    process = _run_tool(tree, scene, argv)

    def replace_paths(text: str) -> str:
        for path, word in ((folder, "RUN"), (tree, "TREE"), (ROOT, "TREE")):
            text = text.replace(str(path), word)
        return text

    printed = [line.rstrip() for line in replace_paths(process.stdout).splitlines()]
    errors = replace_paths(process.stderr).splitlines()
    files = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    return {
        "exit code": process.returncode,
        "standard output": [
            MEASURED.sub(r"# \1", line) for line in printed if line and not NOISE.search(line)
        ],
        "errors": [line for line in errors if line.startswith("error: ")],
        "traceback": "Traceback" in process.stderr and scene.processes == 0,
        "files": {str(path.relative_to(folder)): _read_file(path, replace_paths) for path in files},
    }


def find_cut(folder: Path) -> Path:
    """Return where the run of a scene is kept as it was when it was cut off."""
    return folder.with_name(f"{folder.name}.cut")


def _run_tool(tree: Path, scene: Scene, argv: Sequence[str]) -> "subprocess.CompletedProcess[str]":
    path = f"{DOUBLE}{os.pathsep}{tree}" if scene.double else str(tree)
    fixed = {
        "PYTHONPATH": path,
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "COLUMNS": "140",
    }
    launcher = []
    if scene.processes:
        ranks = f"--nproc_per_node={scene.processes}"
        launcher = ["-m", "torch.distributed.run", "--standalone", ranks]
    return subprocess.run(
        [sys.executable, *launcher, f"tools/{scene.tool}.py", *argv],
        cwd=tree, env={**os.environ, **fixed}, text=True, capture_output=True, timeout=LIMIT,
    )  # fmt: skip


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


def compare_scene(base: Path, scene: Scene, work: Path) -> List[str]:
    """Run a scene in both trees; return the differences."""
    name = re.sub(r"[^A-Za-z0-9_.-]+", "_", scene.name)[:120]
    old = run_scene(base, scene, work / "old" / name)
    new = run_scene(ROOT, scene, work / "new" / name)
    changes = list(iterate_differences(old, new))
    if scene.resumes:
        cut = find_cut(work / "old" / name)
        resumed = run_scene(ROOT, scene, work / "from_old" / name, cut)
        changes += iterate_differences(old["files"], resumed["files"], "from the old checkpoint")
    return changes


def main() -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("commit")
    parser.add_argument("--only", default="", help="run only scenes whose names contain this text")
    parser.add_argument("--jobs", type=int, default=2)
    args = parser.parse_args()
    chosen = [scene for scene in iterate_scenes() if args.only in scene.name]
    worktree = ["git", "-C", str(ROOT), "worktree"]
    differing = 0
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(args.jobs) as pool:
        work, base = Path(folder), Path(folder) / "base"
        subprocess.run([*worktree, "add", "--detach", "-q", base, args.commit], check=True)
        try:
            found = pool.map(lambda scene: compare_scene(base, scene, work), chosen)
            for scene, changes in zip(chosen, found):
                differing += bool(changes)
                if changes:
                    lines = [f"{scene.name}: {len(changes)} differences", *changes[:12]]
                    print(*lines, sep="\n    ", flush=True)
        finally:
            subprocess.run([*worktree, "remove", "--force", base], check=True)
    print(f"{len(chosen)} scenes, {differing} differ from {args.commit}")
    return int(differing > 0)


if __name__ == "__main__":
    sys.exit(main())
