"""Make configs with exchanged values, unknown and repeated keys, YAML that no config may have, and damaged bytes."""

from __future__ import annotations

import copy
import random
from pathlib import Path
from typing import Any, Dict, List, Tuple

import yaml

from ipu_pipe.schedule.methods import METHODS
from tests.hostile.cases import BASE, Bases, Case, damage_bytes, draw_value
from tools.write_keys import collect_sections

KEYS = [
    f"{place}.{key}".lstrip(".")
    for section, places in collect_sections().items()
    for place in places
    for key in section.model_fields
]
# only keys that do not name code get any text: a named function may do anything
HARMLESS = [
    *(key for key in KEYS if key not in ("model.entry", "loss", "data.name", "method_args.head")),
    *(f"model.args.{name}" for name in BASE["model"]["args"]),
]
LOADED = [
    "digits",
    "cifar10",
    "image_folder",
    "synthetic",
    "nothing",
    "models.mlp:none",
    "a:b",
    "",
    3,
]

# each line repeats the one before: 9 to the power of 6 values
_BOMB = "a: &a [1,1,1,1,1,1,1,1,1]\n" + "".join(
    f"{y}: &{y} [{','.join([f'*{x}'] * 9)}]\n" for x, y in zip("abcde", "bcdef")
)
SNIPPETS = [
    "x: !!int abc", "x: !!float abc", "x: !!bool 3", "x: !!null 3", "x: !!python/object/apply:os.getcwd []", "x: !!binary aGk=",
    "x: !!set {a, b}", "x: !!timestamp 2026-99-99", "x: !!omap [a: 1]", "x: ! 3", "? [a, b]\n: 3", "? {a: b}\n: 3", "x: &a [*a]",
    "x: *nowhere", "<<: 3", "<<: [1, 2]", "<<: *nowhere", '"\\ud800": 1', 'x: "\\UFFFFFFFF"', "%YAML 9.9\n---\nseed: 1",
    "seed: 1\n---\nseed: 2", "x: |\n bad\n\tindent", "\tseed: 1", "seed : : 1", "seed: [1, 2", "extends: config.yaml",
    "extends: ..", "extends: /", "extends: /dev/zero", 'extends: "\\0"', "extends: " + "a" * 5000, "extends: []",
    "x: " + "9" * 9000,
    "x: " + "[" * 700 + "]" * 700, "x: " + "{a: " * 300 + "1" + "}" * 300, "- - - - -", "[]", "3", "''", "x: !!str [1]",
    _BOMB,
]  # fmt: skip


def set_key(config: Dict[str, Any], key: str, new: Any) -> None:
    """Set `a.b.c` of a config, with sections where it has none."""
    *above, name = key.split(".")
    section = config
    for part in above:
        if not isinstance(section.get(part), dict):
            section[part] = {}
        section = section[part]
    section[name] = new


def change_config(rng: random.Random) -> Tuple[Dict[Any, Any], List[str]]:
    """Return the base config with some keys changed, added or removed, and a list of the mutations."""
    config = copy.deepcopy(BASE)
    if rng.random() < 0.5:
        config["method"] = rng.choice(list(METHODS))
    mutations = []
    for _ in range(rng.choice([1, 1, 1, 2, 4])):
        kind = rng.random()
        key = rng.choice(HARMLESS)
        if kind < 0.6:
            set_key(config, key, draw_value(rng))
            mutations.append(key)
        elif kind < 0.7:
            root = ["", ".", "/", "gone", "a" * 300]
            config["data"] = {"name": rng.choice(LOADED), "root": rng.choice(root)}
            mutations.append("data")
        elif kind < 0.8:
            name = rng.choice(["", "x", f"{key}s", "ß", "a" * 3000, f"{key}.a.b"])
            set_key(config, name, draw_value(rng))
            mutations.append("an unknown key")
        elif kind < 0.9:
            name = rng.choice(list(config))
            del config[name]
            mutations.append(f"no {name}")
        else:
            config[rng.choice([1, None, True, 0.5])] = draw_value(rng)  # type: ignore[index]
            mutations.append("a key that is not text")
    return config, mutations


def make_config_case(rng: random.Random, folder: Path, bases: Bases) -> Case:
    """Make a case that runs a mutated config, mostly as a dry run."""
    path = folder / "config.yaml"
    config, mutations = change_config(rng)
    how = rng.random()
    if how < 0.25:
        config, mutations = copy.deepcopy(BASE), []
    text = yaml.safe_dump(config, sort_keys=False, allow_unicode=rng.random() < 0.5)
    if how < 0.12:
        snippet = rng.choice(SNIPPETS)
        text = rng.choice([text + snippet + "\n", snippet + "\n" + text])
        mutations = [f"with {snippet[:60]}"]
    content = text.encode("utf-8", "surrogatepass")
    if 0.12 <= how < 0.25:
        content, mutations = damage_bytes(content, rng), ["damaged bytes"]
    path.write_bytes(content)
    argv = ["config.yaml"]
    if rng.random() < 0.8:
        argv.append("--dry-run")
    else:  # two updates are enough to see that it starts
        argv += ["--out", "run", "--set", "steps=2", "evaluate.every=0", "checkpoint.every=null"]
    return Case("train", argv, ", ".join(mutations))
