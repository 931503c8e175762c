"""Make cases of the other commands: plan, rehearse, check, stability, collect, reproduce, predict, with damaged files and odd
words."""

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
    damage_bytes,
    damage_file,
    draw_value,
    draw_word,
    make_odd_output,
)
from tests.hostile.checkpoints import list_checkpoints
from tests.hostile.configs import change_config

CONFIGS = Path(__file__).resolve().parents[2] / "configs"
HARDWARE = [
    file.read_text()
    for file in sorted((CONFIGS / "hardware").glob("*.yaml"))
    if "extends" not in file.read_text()
]
SMALL = ["--set", "steps=2", "data.subset=32"]


def _change_hardware(rng: random.Random, path: Path) -> str:
    """Write a description of hardware with one or two values changed, or with damaged bytes."""
    text = rng.choice(HARDWARE)
    if rng.random() < 0.2:
        path.write_bytes(damage_bytes(text.encode(), rng))
        return "damaged bytes"
    keys: Dict[str, Any] = yaml.safe_load(text)
    mutations = []
    for _ in range(rng.choice([1, 1, 2])):
        section: Any = keys
        while True:
            key = rng.choice(
                list(section) if isinstance(section, dict) else list(range(len(section)))
            )
            if not isinstance(section[key], (dict, list)) or not section[key] or rng.random() < 0.1:
                break
            section = section[key]
        section[key] = rng.choice([rng.choice(FLOATS), rng.choice(TEXTS), draw_value(rng)])
        mutations.append(str(key))
    path.write_bytes(
        yaml.safe_dump(keys, allow_unicode=True, sort_keys=False).encode("utf-8", "surrogatepass")
    )
    return ", ".join(mutations)


def _write_config(rng: random.Random, folder: Path) -> str:
    """Write config.yaml, mostly a correct one. Return a description."""
    config, mutations = change_config(rng) if rng.random() < 0.3 else (BASE, ["a whole config"])
    text = yaml.safe_dump(config, sort_keys=False)
    (folder / "config.yaml").write_bytes(text.encode("utf-8", "surrogatepass"))
    return ", ".join(mutations)


def _draw_options(rng: random.Random, options: str) -> List[str]:
    """Draw up to two of the options, with odd values."""
    argv = []
    for option in rng.sample(options.split(), rng.choice([0, 0, 0, 1, 1, 2])):
        argv.append(option)
        for _ in range(rng.choice([0, 1, 1, 1, 1])):
            argv.append(rng.choice(["1", "2", "8", draw_word(rng), draw_word(rng)]))
    return argv


def make_plan_case(rng: random.Random, folder: Path, bases: Bases) -> Case:
    """Make a case of `plan`, mostly with a damaged config or damaged hardware."""
    mutation = [_write_config(rng, folder), _change_hardware(rng, folder / "hardware.yaml")]
    hardware = rng.choice(["hardware.yaml"] * 12 + ["v100x8", "pod4", draw_word(rng)])
    argv = ["config.yaml", "--hardware", hardware]
    argv += _draw_options(rng, "--devices --memory --batch --top --precision --methods")
    if rng.random() < 0.3:
        argv += ["--write", make_odd_output(rng, folder, "planned.yaml"), "--overwrite"]
    return Case("plan", [*argv, *rng.choice([[], ["--json"]])], ", ".join(mutation))


def _make_stability_case(rng: random.Random, folder: Path, bases: Bases) -> Case:
    mutation = _write_config(rng, folder)
    config = rng.choice(["config.yaml"] * 20 + ["all of it", draw_word(rng)])
    argv = [config, *"--samples 8 --iterations 9".split()]
    argv += _draw_options(rng, "--samples --iterations --seed --curvature --by-stage")
    return Case("stability", [*argv, *rng.choice([[], ["--json"]])], mutation)


def _make_collect_case(rng: random.Random, folder: Path, bases: Bases) -> Case:
    mutation = _write_config(rng, folder)
    argv = ["config.yaml", "--out", make_odd_output(rng, folder, "collected")]
    argv += ["--steps", rng.choice(["0", "0", "2"])]
    methods = ["gpipe", "pipedream,gpipe", "local_greedy", ",", draw_word(rng)]
    argv += ["--methods", rng.choice(methods), *_draw_options(rng, "--steps --rounds --overwrite")]
    return Case("collect", [*argv, *SMALL], mutation)


def _make_reproduce_case(rng: random.Random, folder: Path, bases: Bases) -> Case:
    """Make a case of `reproduce` that runs nothing: a correct experiment would start one process for each run."""
    experiment = {"title": "t", "source": "s", "base": BASE, "full": {}, "seeds": [0], "rows": {"a": {}}, "expect": [],
                  "measure": {"name": "fit"}}  # fmt: skip
    for key in rng.sample(sorted(experiment), rng.choice([1, 2])):
        experiment[key] = draw_value(rng)
    text = yaml.safe_dump(experiment, sort_keys=False)
    (folder / "experiment.yaml").write_bytes(
        damage_bytes(text.encode("utf-8", "surrogatepass"), rng)
    )
    argv = rng.choice([[], ["experiment.yaml"], ["experiment.yaml"], [draw_word(rng)]])
    argv += [*_draw_options(rng, "--seeds --rows --jobs --json"), "--rows", "nothing"]
    return Case("reproduce", argv, "")


def _make_pareto_case(rng: random.Random, folder: Path, bases: Bases) -> Case:
    argv = "--subset 16 --size 4 --width 4 --examples 8 --batches 4 --kinds greedy".split()
    options = "--kinds --batches --rates --examples --width --size --cutoffs --jobs"
    argv += [*_draw_options(rng, options), "--rates", rng.choice(["0", "x", "nan"])]
    return Case("pareto", argv, "an odd command line")


def _make_measurement_case(rng: random.Random, folder: Path, bases: Bases) -> Case:
    """Make a case of `measure_hardware` that must be refused: an accepted one would start processes."""
    argv = _draw_options(rng, "--threads --seconds --device")
    argv += ["--out", rng.choice(["gone/x.yaml", "x.txt"])]
    return Case("measure_hardware", argv, "an odd command line")


def _make_prediction_case(rng: random.Random, folder: Path, bases: Bases) -> Case:
    """Make a case that predicts with a run whose newest checkpoint is damaged."""
    shutil.copytree(bases.end, folder / "run")
    newest = list_checkpoints(folder / "run")[-1]
    files = sorted(path for path in newest.iterdir() if path.is_file())
    mutation = damage_file(rng.choice(files), rng)
    return Case("predict", [rng.choice(["run", str(newest.relative_to(folder))])], mutation)


def _make_name_case(rng: random.Random, folder: Path, bases: Bases) -> Case:
    if rng.choice(["fetch_data", "completion"]) == "completion":
        return Case("completion", [rng.choice([draw_word(rng), "bash"])], "an odd name")
    return Case("fetch_data", [f"no-{draw_word(rng)}"], "an odd name")


def _make_rehearsal_case(rng: random.Random, folder: Path, bases: Bases) -> Case:
    mutation = [_write_config(rng, folder), _change_hardware(rng, folder / "hardware.yaml")]
    hardware = rng.choice(["hardware.yaml", "hardware.yaml", "pod4", draw_word(rng)])
    argv = ["config.yaml", *SMALL, f"hardware={hardware}".replace("\0", "")]
    return Case("rehearse", [*argv, *rng.choice([[], ["--quiet"]])], ", ".join(mutation))


def _make_check_case(rng: random.Random, folder: Path, bases: Bases) -> Case:
    """Make a case of `check` that must be refused: an accepted one would start processes."""
    (folder / "file").touch()
    to = rng.choice(["gone/x.json", "file/x.json", "."])
    return Case("check", ["--to", to, *rng.choice([[], ["--json"]])], "an odd command line")


OTHERS: List[Callable[[random.Random, Path, Bases], Case]] = [
    _make_stability_case, _make_stability_case, _make_collect_case, _make_reproduce_case, _make_reproduce_case,
    _make_pareto_case, _make_measurement_case, _make_prediction_case, _make_prediction_case, _make_name_case,
    _make_rehearsal_case, _make_check_case,
]  # fmt: skip


def make_command_case(rng: random.Random, folder: Path, bases: Bases) -> Case:
    """Make a case of a command that no other kind covers."""
    return rng.choice(OTHERS)(rng, folder, bases)


def predict_run() -> None:
    """Predict with the run that the command line names, as a user's script would."""
    import torch

    import ipu_pipe

    print(ipu_pipe.predict(os.path.join(*sys.argv[1:2]), torch.zeros(4, 64)).shape)
