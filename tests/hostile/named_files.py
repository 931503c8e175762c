"""Replace files that a config or an option names by a pipe, a device, a folder or a huge file; and pass impossible paths
from Python."""

from __future__ import annotations

import copy
import functools
import importlib
import os
import random
import shutil
import sys
from pathlib import Path
from typing import Any, Dict, List, Tuple

import yaml

from tests.hostile.cases import BASE, Bases, Case

ROWS, DRY_RUN = "--stages 4 --microbatches 4", "train config.yaml --dry-run --set"
# command lines that read FILE, and the suffix that they expect
READERS: List[Tuple[str, str]] = [
    (f"schedule rows {ROWS} --file FILE", ".csv"),
    (f"schedule gpipe {ROWS} --file FILE", ".csv"),
    ("train FILE --dry-run", ".yaml"),
    (f"{DRY_RUN} method=rows method_args.file=FILE", ".csv"),
    (f"{DRY_RUN} hardware=FILE", ".yaml"),
    (f"{DRY_RUN} extends=FILE", ".yaml"),
    (f"{DRY_RUN} init_from=FILE", ".safetensors"),
    (f"{DRY_RUN} init_from=FILE", ".pt"),
    ("train config.yaml --evaluate FILE", ".safetensors"),
    ("train config.yaml --evaluate FILE", ".pt"),
    ("plan config.yaml --hardware FILE", ".yaml"),
    ("rehearse FILE", ".yaml"),
    ("rehearse config.yaml --set hardware=FILE", ".yaml"),
    ("collect config.yaml --steps 0 --out out --set hardware=FILE", ".yaml"),
    ("stability FILE --samples 8 --iterations 9", ".yaml"),
    ("reproduce FILE --rows nothing", ".yaml"),
    ("analyze FILE", ".json"),
    ("analyze FILE --json", ".trace"),
    ("analyze run --against FILE", ".json.gz"),
    ("export FILE --to new.safetensors", ""),
    ("predict FILE", ""),
]
# files of sets of data, by the set
DATA = {
    "cifar10": "cifar-10-batches-bin/data_batch_1.bin", "mnist": "mnist/train-images-idx3-ubyte",
    "shakespeare": "shakespeare/shakespeare.txt", "translation": "translation/english.txt",
    "verses": "translation/english.txt",
}  # fmt: skip
# files of a run, read when it is resumed or analyzed
OF_RUN = [
    "config.yaml", "record.json", "metrics.jsonl", "summary.json", "memory.json", "trace.json.gz",
    "checkpoints/step-4/manifest.json", "checkpoints/step-4/model.safetensors",
    "checkpoints/step-4/optimizer.safetensors",
]  # fmt: skip
USERS_OF_RUN = [
    "train config.yaml --out run --resume", "train config.yaml --out run --overwrite --set steps=2", "analyze run",
    "export run --to w.safetensors", "predict run",
]  # fmt: skip


def put_something(path: Path, rng: random.Random) -> str:
    """Put something that is not a small regular file at `path`. Return a description."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.is_file():
        path.unlink()
    how = rng.choice(
        ["pipe", "pipe", "zeros", "zeros", "null", "folder", "loop", "socket", "sparse", "closed"]
    )
    if how == "pipe":
        os.mkfifo(path)
    elif how in ("zeros", "null"):
        path.symlink_to("/dev/zero" if how == "zeros" else "/dev/null")
    elif how == "folder":
        path.mkdir()
    elif how == "loop":
        path.symlink_to(path.name)
    elif how == "socket":
        import socket

        here = os.getcwd()
        os.chdir(path.parent)  # a socket's path is short
        with socket.socket(socket.AF_UNIX) as server:
            server.bind(path.name)
        os.chdir(here)
    elif how == "sparse":
        path.touch()
        os.truncate(path, 2**42)
    else:
        path.touch(mode=0)
    return f"{path.name}: {how}"


def make_named_file_case(rng: random.Random, folder: Path, bases: Bases) -> Case:
    """Make a case of a command that reads something which is not a regular file."""
    config: Dict[str, Any] = copy.deepcopy(BASE)
    how = rng.random()
    if how < 0.6:
        line, suffix = rng.choice(READERS)
        mutation = put_something(folder / f"odd{suffix}", rng)
        tool, *argv = line.replace("FILE", f"odd{suffix}").split()
        if "run" in argv:
            shutil.copytree(bases.end, folder / "run")
    elif how < 0.75:
        name = rng.choice(sorted(DATA))
        config["data"] = {"name": name, "root": "data"}
        mutation = put_something(folder / "data" / DATA[name], rng)
        tool, argv = "train", ["config.yaml", "--dry-run"]
    elif how < 0.9:
        shutil.copytree(bases.run, folder / "run")
        mutation = put_something(folder / "run" / rng.choice(OF_RUN), rng)
        tool, *argv = rng.choice(USERS_OF_RUN).split()
    else:
        shutil.copytree(bases.end, folder / "run")
        number = rng.randrange(1000)
        tool, argv, mutation = "call", [str(number)], f"an impossible path, call {number}"
    (folder / "config.yaml").write_text(yaml.safe_dump(config, sort_keys=False))
    return Case(tool, argv, mutation)


COMMANDS = [
    "train PATH", "train config.yaml --out PATH", "train config.yaml --evaluate PATH", f"{DRY_RUN} init_from=PATH",
    "analyze PATH", "analyze run --html PATH", "analyze run --png PATH", "analyze run --against PATH",
    "export PATH --to new", "export run --to PATH", "plan config.yaml --hardware PATH",
    "plan config.yaml --hardware v100x8 --write PATH", "collect config.yaml --out PATH --steps 0",
    "schedule rows --stages 2 --microbatches 4 --file PATH", "stability PATH", "fetch_data mnist --root PATH",
]  # fmt: skip


def _call_command(tool: str, *words: Any) -> None:
    *argv, path = words
    module = importlib.import_module(f"ipu_pipe.cli.{tool}")
    module.main([word.replace("PATH", path) for word in argv])


def call_with_odd_path() -> None:
    """Call a function or a command of the library from Python with an impossible path."""
    import torch

    import ipu_pipe
    from ipu_pipe.run.train import evaluate_checkpoint

    config = ipu_pipe.load_config("config.yaml")
    odd = ["a\0b", "\0", "run\0", "a/\0/b", "\ud800"]
    calls: List[Any] = [
        lambda path: ipu_pipe.train(config, path),
        lambda path: ipu_pipe.train(config, Path(path)),
        lambda path: ipu_pipe.train(config, path, resume=True),
        ipu_pipe.load_config,
        lambda path: ipu_pipe.predict(path, torch.zeros(4, 64)),
        lambda path: ipu_pipe.export(path, "new.safetensors"),
        lambda path: ipu_pipe.export("run", path),
        lambda path: ipu_pipe.export("run", path + ".safetensors"),
        lambda path: evaluate_checkpoint(config, path),
        ipu_pipe.analyze_run,
        lambda path: ipu_pipe.load_data("mnist", root=path),
        lambda path: ipu_pipe.load_data("image_folder", root=path),
        lambda path: ipu_pipe.plan_config(config, path),
        lambda path: evaluate_checkpoint(config, path + ".safetensors"),
        lambda path: ipu_pipe.load_config("config.yaml", [f"method_args.file={path}"]),
        *(functools.partial(_call_command, *line.split()) for line in COMMANDS),
    ]
    number = int(sys.argv[1])
    calls[number % len(calls)](odd[number // len(calls) % len(odd)])
