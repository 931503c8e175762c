"""Command lines: options unknown, doubled, without or with odd values; overrides that are no YAML or no text."""

from __future__ import annotations

import os
import random
from pathlib import Path
from typing import List

import yaml

from ipu_pipe.schedule.methods import METHODS
from tests.hostile.cases import BASE, Bases, Case, word
from tests.hostile.configs import HARMLESS, SNIPPETS

TRAIN = [
    "--set", "--out", "--resume", "--overwrite", "--evaluate", "--against", "--nothing", "--se", "-x", "--", "--out=",
]  # fmt: skip
SCHEDULE = [
    "--stages", "--microbatches", "--accumulate", "--format", "--slots", "--drains", "--schedule", "--turn", "--stash",
    "-h",
]  # fmt: skip


def _override(rng: random.Random) -> str:
    how = rng.random()
    if how < 0.1:
        return word(rng)
    key = ".".join(rng.choice(HARMLESS))
    if how < 0.2:
        key = rng.choice(
            ["a." * 3000 + "a", key + ".x", "." + key, key + ".", key.upper(), os.fsdecode(b"\xff")]
        )
    text = rng.choice(SNIPPETS).partition(": ")[2] if how < 0.4 else word(rng)
    return f"{key}={text}".replace("\0", "")


def make(rng: random.Random, folder: Path, bases: Bases) -> Case:
    """tools/train.py or tools/schedule.py with an odd command line."""
    if rng.random() < 0.4:
        argv = [
            rng.choice([*METHODS, word(rng)]), "--stages", rng.choice(["4", "2", word(rng)]), "--microbatches",
            rng.choice(["8", "16", word(rng)]),
        ]  # fmt: skip
        for _ in range(rng.choice([0, 1, 2])):
            argv.append(rng.choice(SCHEDULE))
            argv += [
                rng.choice(["1", "2", "4", "json", "csv", "0:4", "true", word(rng)])
                for _ in range(rng.choice([0, 1, 1]))
            ]
        return Case("schedule", argv, "an odd command line")
    (folder / "config.yaml").write_text(yaml.safe_dump(BASE, sort_keys=False))
    words: List[str] = [
        rng.choice(["config.yaml"] * 8 + ["", ".", "/dev/null", "gone.yaml", word(rng)]),
        "--dry-run",
    ]
    for _ in range(rng.choice([1, 1, 2, 3])):
        if rng.random() < 0.7:
            words += ["--set", *(_override(rng) for _ in range(rng.choice([1, 1, 3])))]
        else:
            words.append(rng.choice(TRAIN))
            words += [word(rng) for _ in range(rng.choice([0, 1]))]
    if rng.random() < 0.2:
        rng.shuffle(words)
    if rng.random() < 0.15 and "--dry-run" in words:
        words.remove("--dry-run")
        words += ["--set", "steps=2"]
    return Case("train", words, "an odd command line")
