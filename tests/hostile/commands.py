"""The other commands: plans for damaged hardware, stability, comparisons, experiments, predictions; and odd words to all."""

from __future__ import annotations

import os
import random
import shutil
import sys
from pathlib import Path
from typing import Any, Callable, Dict, List

import yaml

from tests.hostile.cases import (
    BASE,
    FLOATS,
    TEXTS,
    Bases,
    Case,
    damage,
    damage_file,
    odd_output,
    value,
    word,
)
from tests.hostile.configs import change_config

CONFIGS = Path(__file__).resolve().parents[2] / "configs"
HARDWARE = [
    file.read_text()
    for file in sorted((CONFIGS / "hardware").glob("*.yaml"))
    if "extends" not in file.read_text()
]
SMALL = ["--set", "steps=2", "data.subset=32"]


def _change_hardware(rng: random.Random, path: Path) -> str:
    """Write a description of hardware with one or two of its values changed, or its bytes damaged."""
    text = rng.choice(HARDWARE)
    if rng.random() < 0.2:
        path.write_bytes(damage(text.encode(), rng))
        return "damaged bytes"
    keys: Dict[str, Any] = yaml.safe_load(text)
    said = []
    for _ in range(rng.choice([1, 1, 2])):
        section: Any = keys
        while True:
            key = rng.choice(
                list(section) if isinstance(section, dict) else list(range(len(section)))
            )
            if not isinstance(section[key], (dict, list)) or not section[key] or rng.random() < 0.1:
                break
            section = section[key]
        section[key] = rng.choice([rng.choice(FLOATS), rng.choice(TEXTS), value(rng)])
        said.append(str(key))
    path.write_bytes(
        yaml.safe_dump(keys, allow_unicode=True, sort_keys=False).encode("utf-8", "surrogatepass")
    )
    return ", ".join(said)


def _config(rng: random.Random, folder: Path) -> str:
    """Write config.yaml, mostly as it should be."""
    config, said = change_config(rng) if rng.random() < 0.3 else (BASE, ["a whole config"])
    text = yaml.safe_dump(config, sort_keys=False)
    (folder / "config.yaml").write_bytes(text.encode("utf-8", "surrogatepass"))
    return ", ".join(said)


def _options(rng: random.Random, options: List[str]) -> List[str]:
    """Return up to two of the options with odd values."""
    argv = []
    for option in rng.sample(options, rng.choice([0, 0, 0, 1, 1, 2])):
        argv += [
            option,
            *(
                rng.choice(["1", "2", "8", word(rng), word(rng)])
                for _ in range(rng.choice([0, 1, 1, 1, 1]))
            ),
        ]
    return argv


def make_plan(rng: random.Random, folder: Path, bases: Bases) -> Case:
    """Make a plan for a config and hardware, of which one is mostly damaged."""
    what = [_config(rng, folder), _change_hardware(rng, folder / "hardware.yaml")]
    argv = [
        "config.yaml",
        "--hardware",
        rng.choice(["hardware.yaml"] * 12 + ["v100x8", "pod4", word(rng)]),
    ]
    argv += _options(rng, ["--devices", "--memory", "--batch", "--top", "--precision", "--methods"])
    if rng.random() < 0.3:
        argv += ["--write", odd_output(rng, folder, "planned.yaml"), "--overwrite"]
    return Case("plan", [*argv, *rng.choice([[], ["--json"]])], ", ".join(what))


def _stability(rng: random.Random, folder: Path, bases: Bases) -> Case:
    what = _config(rng, folder)
    argv = [
        rng.choice(["config.yaml"] * 20 + ["all of it", word(rng)]),
        "--samples",
        "8",
        "--iterations",
        "9",
    ]
    argv += _options(rng, ["--samples", "--iterations", "--seed", "--curvature", "--by-stage"])
    return Case("stability", [*argv, *rng.choice([[], ["--json"]])], what)


def _collect(rng: random.Random, folder: Path, bases: Bases) -> Case:
    what = _config(rng, folder)
    argv = [
        "config.yaml",
        "--out",
        odd_output(rng, folder, "collected"),
        "--steps",
        rng.choice(["0", "0", "2"]),
    ]
    argv += ["--methods", rng.choice(["gpipe", "pipedream,gpipe", "local_greedy", ",", word(rng)])]
    argv += _options(rng, ["--steps", "--rounds", "--overwrite"])
    return Case("collect", [*argv, *SMALL], what)


def _reproduce(rng: random.Random, folder: Path, bases: Bases) -> Case:
    """List, or run nothing: an experiment that is whole would take a process a run."""
    experiment = {"title": "t", "source": "s", "base": BASE, "full": {}, "seeds": [0], "rows": {"a": {}}, "expect": [],
                  "measure": {"name": "fit"}}  # fmt: skip
    for key in rng.sample(sorted(experiment), rng.choice([1, 2])):
        experiment[key] = value(rng)
    text = yaml.safe_dump(experiment, sort_keys=False)
    (folder / "experiment.yaml").write_bytes(damage(text.encode("utf-8", "surrogatepass"), rng))
    argv = rng.choice([[], ["experiment.yaml"], ["experiment.yaml"], [word(rng)]])
    return Case(
        "reproduce",
        [*argv, *_options(rng, ["--seeds", "--rows", "--jobs", "--json"]), "--rows", "nothing"],
        "",
    )


def _pareto(rng: random.Random, folder: Path, bases: Bases) -> Case:
    argv = [
        "--subset",
        "16",
        "--size",
        "4",
        "--width",
        "4",
        "--examples",
        "8",
        "--batches",
        "4",
        "--kinds",
        "greedy",
    ]
    odd = _options(
        rng,
        [
            "--kinds",
            "--batches",
            "--rates",
            "--examples",
            "--width",
            "--size",
            "--cutoffs",
            "--jobs",
        ],
    )
    return Case(
        "pareto", [*argv, *odd, "--rates", rng.choice(["0", "x", "nan"])], "an odd command line"
    )


def _measure(rng: random.Random, folder: Path, bases: Bases) -> Case:
    """Refuse to measure: what is accepted would start processes."""
    argv = _options(rng, ["--threads", "--seconds", "--device"])
    return Case(
        "measure_hardware",
        [*argv, "--out", rng.choice(["gone/x.yaml", "x.txt"])],
        "an odd command line",
    )


def _predict(rng: random.Random, folder: Path, bases: Bases) -> Case:
    """Predict with a run whose newest checkpoint is damaged."""
    shutil.copytree(bases.end, folder / "run")
    newest = max(
        (folder / "run" / "checkpoints").glob("step-*"),
        key=lambda path: int(path.name.split("-")[1]),
    )
    what = damage_file(rng.choice(sorted(path for path in newest.iterdir() if path.is_file())), rng)
    return Case("predict", [rng.choice(["run", str(newest.relative_to(folder))])], what)


def _named(rng: random.Random, folder: Path, bases: Bases) -> Case:
    tool = rng.choice(["fetch_data", "completion"])
    return Case(
        tool,
        [rng.choice([word(rng), "bash"]) if tool == "completion" else f"no-{word(rng)}"],
        "an odd name",
    )


OTHERS: List[Callable[[random.Random, Path, Bases], Case]] = [
    _stability, _stability, _collect, _reproduce, _reproduce, _pareto, _measure, _predict, _predict, _named,
]  # fmt: skip


def make(rng: random.Random, folder: Path, bases: Bases) -> Case:
    """Return one of the commands that no other kind covers."""
    return rng.choice(OTHERS)(rng, folder, bases)


def predict() -> None:
    """Predict from the run that the command line names, as a user's script would."""
    import torch

    import ipu_pipe

    print(ipu_pipe.predict(os.path.join(*sys.argv[1:2]), torch.zeros(4, 64)).shape)
