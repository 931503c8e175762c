"""Make command lines with unknown and repeated options, odd or missing values, and overrides that are not YAML or not text."""

from __future__ import annotations

import os
import random
from pathlib import Path
from typing import List

from ipu_pipe.schedule.methods import METHODS
from tests.hostile.cases import Bases, Case, draw_word, write_config
from tests.hostile.configs import HARMLESS, SNIPPETS

TRAIN = [
    "--set", "--out", "--resume", "--overwrite", "--evaluate", "--against", "--nothing", "--se", "-x", "--", "--out=",
]  # fmt: skip
SCHEDULE = [
    "--stages", "--microbatches", "--accumulate", "--format", "--slots", "--drains", "--schedule", "--turn", "--stash",
    "-h",
]  # fmt: skip


def _draw_override(rng: random.Random) -> str:
    how = rng.random()
    if how < 0.1:
        return draw_word(rng)
    key = rng.choice(HARMLESS)
    if how < 0.2:
        odd = [
            "a." * 3000 + "a",
            f"{key}.x",
            f".{key}",
            f"{key}.",
            key.upper(),
            os.fsdecode(b"\xff"),
        ]
        key = rng.choice(odd)
    text = rng.choice(SNIPPETS).partition(": ")[2] if how < 0.4 else draw_word(rng)
    return f"{key}={text}".replace("\0", "")


def make_command_line_case(rng: random.Random, folder: Path, bases: Bases) -> Case:
    """Make a case of tools/train.py or tools/schedule.py with an odd command line."""
    if rng.random() < 0.4:
        argv = [
            rng.choice([*METHODS, draw_word(rng)]), "--stages", rng.choice(["4", "2", draw_word(rng)]), "--microbatches",
            rng.choice(["8", "16", draw_word(rng)]),
        ]  # fmt: skip
        for _ in range(rng.choice([0, 1, 2])):
            argv.append(rng.choice(SCHEDULE))
            for _ in range(rng.choice([0, 1, 1])):
                argv.append(
                    rng.choice(["1", "2", "4", "json", "csv", "0:4", "true", draw_word(rng)])
                )
        return Case("schedule", argv, "an odd command line")
    write_config(folder)
    config = rng.choice(["config.yaml"] * 8 + ["", ".", "/dev/null", "gone.yaml", draw_word(rng)])
    words: List[str] = [config, "--dry-run"]
    for _ in range(rng.choice([1, 1, 2, 3])):
        if rng.random() < 0.7:
            words += ["--set", *(_draw_override(rng) for _ in range(rng.choice([1, 1, 3])))]
        else:
            words.append(rng.choice(TRAIN))
            words += [draw_word(rng) for _ in range(rng.choice([0, 1]))]
    if rng.random() < 0.2:
        rng.shuffle(words)
    if rng.random() < 0.15 and "--dry-run" in words:
        words.remove("--dry-run")
        words += ["--set", "steps=2"]
    return Case("train", words, "an odd command line")
