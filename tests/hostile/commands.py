"""Make cases of the other commands: plan, rehearse, check, stability, collect, reproduce, with damaged files and odd words."""

from __future__ import annotations

import os
import random
import sys
from pathlib import Path
from typing import Any, List

import yaml

from ipu_pipe.schedule.methods import METHODS
from tests.hostile.cases import (
    BASE,
    Bases,
    Case,
    change_value,
    damage_bytes,
    draw_value,
    draw_word,
    make_odd_output,
)
from tests.hostile.configs import HARMLESS, SNIPPETS, change_config

CONFIGS = Path(__file__).resolve().parents[2] / "configs"
HARDWARE = [
    file.read_text()
    for file in sorted((CONFIGS / "hardware").glob("*.yaml"))
    if "extends" not in file.read_text()
]
LISTS = ["gpipe", "pipedream,gpipe", "local_greedy", ","]
TRAIN = "--set --out --resume --overwrite --evaluate --against --nothing --se -x -- --out="
SCHEDULE = (
    "--stages --microbatches --accumulate --format --slots --drains --schedule --turn --stash -h"
)
# command lines, and the options of which some are added; words in capitals are drawn
LINES = [
    ("plan CONFIG --hardware HARDWARE", "--devices --memory --batch --top --precision --methods --json"),
    ("plan CONFIG --hardware HARDWARE --json", "--devices --memory --batch --top --precision --methods"),
    ("plan CONFIG --hardware HARDWARE --overwrite --write OUT.yaml", "--methods"),
    ("stability CONFIG --samples 8 --iterations 9", "--samples --iterations --seed --curvature --by-stage"),
    ("stability CONFIG --samples 8 --iterations 9 --json", "--samples --iterations --seed --curvature"),
    ("collect CONFIG --out OUT --steps 0 --methods LIST --set steps=2 data.subset=32", "--steps --rounds --overwrite"),
    ("rehearse CONFIG --set steps=2 data.subset=32 hardware=HARDWARE", "--quiet"),
    # these must be refused: accepted ones would start processes
    ("reproduce EXPERIMENT --rows nothing", "--seeds --rows --jobs --json"),
    ("pareto --subset 16 --size 4 --width 4 --examples 8 --batches 4 --kinds greedy --rates nan",
     "--kinds --batches --examples --width --size --cutoffs --jobs"),
    ("measure_hardware --out gone/x.yaml", "--threads --seconds --device"),
    ("check --to gone/x.json", "--json"),
    ("fetch_data no-WORD", ""), ("completion WORD", ""),
    *[("train CONFIG --dry-run --set OVERRIDE OVERRIDE", TRAIN), ("train CONFIG --set OVERRIDE steps=2", TRAIN)] * 3,
    *[("schedule METHOD --stages SIZE --microbatches SIZE", SCHEDULE)] * 3,
]  # fmt: skip


def _change_hardware(rng: random.Random, path: Path) -> str:
    """Write a description of hardware with one or two values changed, or with damaged bytes."""
    text = rng.choice(HARDWARE)
    if rng.random() < 0.2:
        path.write_bytes(damage_bytes(text.encode(), rng))
        return "damaged bytes"
    keys = yaml.safe_load(text)
    mutations = [change_value(keys, rng) for _ in range(rng.choice([1, 1, 2]))]
    _write_yaml(path, keys)
    return ", ".join(mutations)


def _write_yaml(path: Path, content: Any) -> None:
    text = yaml.safe_dump(content, allow_unicode=True, sort_keys=False)
    path.write_bytes(text.encode("utf-8", "surrogatepass"))


def _write_config(rng: random.Random, path: Path) -> str:
    """Write a config, mostly a correct one. Return a description."""
    config, mutations = change_config(rng) if rng.random() < 0.3 else (BASE, ["a whole config"])
    _write_yaml(path, config)
    return ", ".join(mutations)


def _write_experiment(rng: random.Random, path: Path) -> None:
    """Write an experiment with one or two odd values and damaged bytes."""
    experiment = {"title": "t", "source": "s", "base": BASE, "full": {}, "seeds": [0], "rows": {"a": {}}, "expect": [],
                  "measure": {"name": "fit"}}  # fmt: skip
    for key in rng.sample(sorted(experiment), rng.choice([1, 2])):
        experiment[key] = draw_value(rng)
    _write_yaml(path, experiment)
    path.write_bytes(damage_bytes(path.read_bytes(), rng))


def _draw_override(rng: random.Random) -> str:
    key, how = rng.choice(HARMLESS), rng.random()
    if how < 0.2:
        odd = [
            "a." * 3000 + "a",
            f"{key}.x",
            f".{key}",
            f"{key}.",
            key.upper(),
            os.fsdecode(b"\xff"),
            draw_word(rng),
        ]
        key = rng.choice(odd)
    text = rng.choice(SNIPPETS).partition(": ")[2] if how < 0.4 else draw_word(rng)
    return f"{key}={text}".replace("\0", "")


def _draw_options(rng: random.Random, options: str) -> List[str]:
    """Draw up to two of the options, with odd values."""
    argv, known = [], options.split()
    for option in rng.sample(known, min(len(known), rng.choice([0, 0, 0, 1, 1, 2]))):
        argv.append(option)
        for _ in range(rng.choice([0, 1, 1, 1, 1])):
            argv.append(rng.choice(["1", "8", "json", "0:4", draw_word(rng), draw_word(rng)]))
    return argv


def make_command_case(rng: random.Random, folder: Path, bases: Bases) -> Case:
    """Make a case of a command that no other kind covers, with damaged files and odd words."""
    config_mutation = _write_config(rng, folder / "config.yaml")
    hardware_mutation = _change_hardware(rng, folder / "hardware.yaml")
    _write_experiment(rng, folder / "experiment.yaml")
    drawn = {
        "CONFIG": rng.choice(["config.yaml"] * 20 + ["all of it", draw_word(rng)]),
        "HARDWARE": rng.choice(["hardware.yaml"] * 12 + ["v100x8", "pod4", draw_word(rng)]),
        "EXPERIMENT": rng.choice(["experiment.yaml", "experiment.yaml", draw_word(rng)]),
        "LIST": rng.choice([*LISTS, draw_word(rng)]),
        "METHOD": rng.choice([*METHODS, draw_word(rng)]),
        "SIZE": rng.choice(["4", "8", draw_word(rng)]),
        "OVERRIDE": _draw_override(rng),
        "WORD": draw_word(rng),
        "OUT": make_odd_output(rng, folder, "out"),
    }
    line, options = rng.choice(LINES)
    tool, *words = line.split()
    for name, value in drawn.items():
        words = [word.replace(name, value) for word in words]
    words = [*_draw_options(rng, options), *words]
    if rng.random() < 0.1:
        rng.shuffle(words)
    mutation = f"{config_mutation}; {hardware_mutation}"
    return Case(tool, words, mutation)


def predict_run() -> None:
    """Predict with the run that the command line names, as a user's script would."""
    import torch

    import ipu_pipe

    print(ipu_pipe.predict(os.path.join(*sys.argv[1:2]), torch.zeros(4, 64)).shape)
