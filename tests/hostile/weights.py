"""Make files of weights with odd keys, odd values or damaged bytes; then evaluate them or begin a run with them."""

from __future__ import annotations

import contextlib
import random
import shutil
from collections import OrderedDict
from pathlib import Path
from typing import Any, Callable, Dict, List

import torch

from tests.hostile.cases import TEXTS, Bases, Case, damage_file, draw_short_run, write_config
from tests.hostile.checkpoints import LAST

KEYS: List[Any] = [3, -1, 0, True, None, 1.5, (1, 2), (), b"weight", ("a", "b"), *TEXTS]
ODD: List[Callable[[torch.Tensor], Any]] = [
    lambda t: t.to_sparse(),
    lambda t: t.reshape(-1, t.shape[-1]).to_sparse_csr(),
    lambda t: torch.quantize_per_tensor(t.float(), 0.1, 0, torch.qint8),
    lambda t: torch.nested.nested_tensor([t, t[:1]]),
    lambda t: t.to("meta"),
    lambda t: t.to(torch.complex64).conj(),
    lambda t: t.bool(),
    lambda t: t.double(),
    lambda t: t.to(torch.float8_e4m3fn),
    lambda t: torch.nn.Parameter(t),
    lambda t: t[..., None],
    lambda t: t[:0],
    lambda t: torch.zeros(1).expand(t.shape),
    lambda t: torch._neg_view(t),
    lambda t: t * float("nan"),
    lambda t: {"inner": t},
    lambda t: (t, t),
    lambda t: None,
    lambda t: "text",
    lambda t: t.tolist(),
]


def change_weights(weights: Dict[Any, Any], rng: random.Random) -> str:
    """Change, add or rename tensors of a state dict. Return a description."""
    mutations = []
    for _ in range(rng.choice([1, 1, 1, 2])):
        name, how = rng.choice(list(weights)), rng.random()
        if how < 0.3:
            key = rng.choice(KEYS)
            weights[key] = weights.pop(name) if rng.random() < 0.5 else torch.zeros(2)
            mutations.append(f"a key {key!r:.40}")
        elif isinstance(weights[name], torch.Tensor):
            number = rng.randrange(len(ODD))
            # PyTorch cannot convert every tensor that is odd already
            with contextlib.suppress(Exception):
                weights[name] = ODD[number](weights[name])
            mutations.append(f"{name}: odd value {number}")
    return ", ".join(mutations)


def make_weights_case(rng: random.Random, folder: Path, bases: Bases) -> Case:
    """Make a case that evaluates a file of odd weights, or begins a run with it."""
    from safetensors.torch import load_file

    weights: Dict[Any, Any] = dict(load_file(bases.end / LAST / "model.safetensors"))
    mutation = change_weights(weights, rng)
    outer: Any = rng.choice(
        [weights] * 6 + [OrderedDict(weights), {"model": weights}, [weights], list(weights.items())]
    )
    try:
        torch.save(outer, folder / "w.pt")
    # PyTorch does not save every kind of tensor
    except Exception:
        torch.save({}, folder / "w.pt")
    name = "w.pt"
    if rng.random() < 0.3:
        name = rng.choice(["w.pt", "w.safetensors"])
        shutil.copyfile(bases.end / LAST / "model.safetensors", folder / "w.safetensors")
        mutation = damage_file(folder / name, rng)
    if rng.random() < 0.5:
        write_config(folder)
        return Case("train", ["config.yaml", "--evaluate", name], mutation)
    write_config(folder, init_from=rng.choice([name, {"path": name, "strict": False}]))
    return Case("train", draw_short_run(rng), mutation)
