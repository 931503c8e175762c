"""Check that a saved state resumes bitwise: every method of the table, every scope of clipping,
every step that may drain."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any, Dict, List, NamedTuple, Optional, Tuple

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import ipu_pipe
from ipu_pipe.errors import BadInput
from ipu_pipe.schedule.methods import METHODS
from tests.support.slow import mark_slow

UPDATES = 7
# norms of earlier updates, which clip later ones, begin anew after a drain, and are late by up to 7 updates
UPDATES_OF_DELAYED_NORMS = 15
# a run that saves at several steps is resumed from each of them
SAVES = [(1, 4), (2, 5), (3, 6)]
# other steps of an object that loads a state, a multiple of the rounds below
USED = 6
SCOPES = [None, "stage", "global", "delayed_global"]
# two devices of two stages in PyTorch's format, four microbatches
ROWS = """\
0F0,0F1,0F2,0F3,,0B0,0B1,0B2,0B3
,1F0,1B0,1F1,1B1,1F2,1B2,1F3,1B3
"""
# backwards in another order than the microbatches'
BACKWARDS = """\
0F0,0F1,0F2,0F3,,0B3,0B0,0B1,0B2
,1F0,1F1,1F2,1F3,1B3,1B0,1B1,1B2
"""


class Variant(NamedTuple):
    """A method with arguments of `Pipeline`."""

    method: str
    keys: Dict[str, Any] = {}
    optimizer_name: str = "sgd"
    stages: Any = ["2", "4", "6"]


def make_variant(method: str, **args: Any) -> Variant:
    return Variant(method, {"method_args": args})


ADAPTIVE = {"scale": 0.1, "adaptive": True}
# each with state of its own
VARIANTS: Dict[str, Variant] = {
    **{name: Variant(name) for name in METHODS if name != "rows"},
    "pipemare_t1_t2": make_variant("pipemare", t1={"anneal_updates": 5}, t2={"decay": 0.5}),
    "pipemare_warmup": Variant("pipemare", {"warmup": 3, "method_args": {"t2": {}}}),
    "pipemare_hogwild": make_variant("pipemare", hogwild={"max": 4, "mean": 2}),
    "pipemare_recompute": make_variant("pipemare", recompute={"segments": 2}),
    "pb_sc_lwp": make_variant("pipelined_backprop", spike_compensation={}, weight_prediction={"form": "velocity"}),
    "pb_difference": make_variant("pipelined_backprop", weight_prediction={"form": "difference"}),
    "pb_feedback": make_variant("pipelined_backprop", error_feedback={}),
    "pb_split": Variant("pipelined_backprop", {"method_args": {"split_backward": True}, "stages_per_device": 2}),
    "pipedream_n2": Variant("pipedream", {"microbatches": 2}),
    "pipedream_adaptive": make_variant("pipedream", delay_compensation=ADAPTIVE),
    "pipedream_gap": make_variant("pipedream", gap_aware={"decay": 0.5}),
    "pipedream_adam": Variant("pipedream", optimizer_name="adam"),
    "pipedream_replicas": Variant("pipedream", {"replicas": 2}),
    "pipedream_weights": Variant("pipedream", {"loss_weight": lambda y: float((y == 0).sum()), "microbatches": 2}),
    "gpipe_mixed": Variant("gpipe", {"precision": "bfloat16_mixed"}),
    "pipedream_mixed": Variant("pipedream", {"precision": "bfloat16_mixed"}, "adam"),
    "pipedream_2bw_replicas": Variant("pipedream_2bw", {"replicas": 2}),
    "local_greedy_blocks": make_variant("local_greedy", block_rates=[1, 2, 1, 1], block_accumulation=[1, 2, 1, 3]),
    "local_greedy_adam": Variant("local_greedy", optimizer_name="adam"),
    "local_sgd_rounds": make_variant("local_sgd", local_steps=3, replicas=2),
    "local_sgd_adam": Variant("local_sgd", {"method_args": {"local_steps": 3}}, "adam"),
    "diloco": make_variant("local_sgd", local_steps=3, outer={"name": "sgd", "lr": 0.7, "momentum": 0.9}),
    "diloco_streams": make_variant(
        "local_sgd", local_steps=4, outer={"name": "sgd", "fragments": 2, "delay": 1, "mix": 0.5, "momentum": 0.9}
    ),
    "randomized_nag": make_variant("randomized_pipedream", nag=0.5),
    "rows": Variant("rows", {"rows": ROWS}, stages=["4"]),
    "rows_backwards": Variant("rows", {"rows": BACKWARDS}, stages=["4"]),
}  # fmt: skip


def make_float_batch(k: int, samples: int = 24) -> Tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(k)
    x = torch.randn(samples, 4, generator=generator, dtype=torch.float64)
    return x, torch.randint(0, 3, (samples,), generator=generator)


class Training:
    """Training loop of one's own over a variant, with a scheduler; it saves and loads its parts
    as in docs/own_loop.md."""

    def __init__(self, variant: Variant, scope: Optional[str], folder: Path) -> None:
        torch.manual_seed(0)
        layers: List[nn.Module] = [nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4), nn.Tanh()]
        layers += [nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 3)]
        self.model = nn.Sequential(*layers)
        keys = dict(variant.keys)
        if "precision" not in keys:
            self.model.double()
        if "rows" in keys:
            file = folder / "rows.csv"
            file.write_text(keys.pop("rows"), encoding="utf-8")
            keys.update(method_args={"file": str(file)}, microbatches=4)
        optimizer_class = torch.optim.Adam if variant.optimizer_name == "adam" else torch.optim.SGD
        settings: Dict[str, Any] = {} if variant.optimizer_name == "adam" else {"momentum": 0.9}
        self.optimizer = optimizer_class(self.model.parameters(), lr=0.05, **settings)
        self.scheduler = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.9)
        clip = None if scope is None else (0.1, scope)
        self.pipe = ipu_pipe.Pipeline(
            self.model,
            cross_entropy,
            self.optimizer,
            variant.method,
            stages=variant.stages,
            clip=clip,
            **keys,
        )
        self.losses: List[Any] = []

    @property
    def parts(self) -> Dict[str, Any]:
        return {"pipe": self.pipe, "optimizer": self.optimizer, "scheduler": self.scheduler}

    def step(self, k: int) -> None:
        x, y = make_float_batch(k)
        dtype = next(self.model.parameters()).dtype
        updates = self.pipe.step(x.to(dtype), y)
        self.losses += [(update.index, update.loss, update.blocks) for update in updates]
        self.scheduler.step()

    def save(self) -> bytes:
        file = io.BytesIO()
        torch.save({name: part.state_dict() for name, part in self.parts.items()}, file)
        return file.getvalue()

    def load(self, content: bytes) -> None:
        states = torch.load(io.BytesIO(content), weights_only=True)
        for name, part in self.parts.items():
            part.load_state_dict(states[name])

    def end(self) -> Dict[str, Any]:
        """Close the pipeline, and return the final states of model, pipeline and optimizer."""
        state = self.pipe.state_dict() if self.pipe.can_drain else {}
        self.losses += [(update.index, update.loss, update.blocks) for update in self.pipe.close()]
        return {
            "model": dict(self.model.state_dict()),
            "pipe": state,
            "optimizer": self.optimizer.state_dict(),
        }


def flatten(value: Any, name: str = "") -> Dict[str, Any]:
    """Return the leaves of nested mappings and lists, by path."""
    if isinstance(value, (dict, list, tuple)):
        items = value.items() if isinstance(value, dict) else enumerate(value)
        leaves: Dict[str, Any] = {}
        for key, inner in items:
            leaves.update(flatten(inner, f"{name}/{key}"))
        return leaves
    return {name: value}


def assert_same_ends(expected: Any, actual: Any) -> None:
    one, other = flatten(expected), flatten(actual)
    assert one.keys() == other.keys()
    different = []
    for name, value in one.items():
        is_same = (
            torch.equal(value, other[name])
            if isinstance(value, torch.Tensor)
            else value == other[name]
        )
        different += [] if is_same else [name]
    assert different == []


def list_scopes(variant: Variant) -> List[Optional[str]]:
    """Return the scopes of clipping that a method supports."""
    method = METHODS[variant.method]
    if method.structure is not None and method.structure.overlap:
        return [None]
    if method.flushes:
        return [None, "stage", "global"]
    steps_alone = (
        method.structure is not None or method.rounds is not None or method.history is not None
    )
    return (
        [None, "stage"]
        if steps_alone or "warmup" in variant.keys
        else [None, "stage", "delayed_global"]
    )


def resume_everywhere(
    variant: Variant, scope: Optional[str], folder: Path
) -> Tuple[List[int], torch.Tensor]:
    """Compare the runs that resume from each saved state with the runs that saved them.

    Return the steps of the states, and the weights of the last run.
    """
    steps: List[int] = []
    count = UPDATES_OF_DELAYED_NORMS if scope == "delayed_global" else UPDATES
    for saves in SAVES:
        straight = Training(variant, scope, folder)
        files: Dict[int, bytes] = {}
        for k in range(count):
            straight.step(k)
            if k + 1 in saves and straight.pipe.can_drain:
                files[k + 1] = straight.save()
        expected = straight.end()
        for at, content in files.items():
            # a new object before its first step and, once for each run, one that has made other steps
            for before in (0, USED) if at == min(files) else (0,):
                resumed = Training(variant, scope, folder)
                for k in range(before):
                    resumed.step(k + 50)
                resumed.load(content)
                resumed.losses.clear()
                for k in range(at, count):
                    resumed.step(k)
                    if k + 1 in files:
                        resumed.save()
                assert_same_ends(expected, resumed.end())
                assert resumed.losses == [loss for loss in straight.losses if loss[0] >= at]
            steps.append(at)
    return sorted(steps), torch.cat([p.detach().flatten() for p in straight.model.parameters()])


# in rounds of an outer optimizer or of accumulating blocks
ROUNDS = {"diloco": [3, 6], "diloco_streams": [2, 4, 6], "local_greedy_blocks": [6]}


# one of each kind of state, which `make test` runs
QUICK = {
    "pipedream_adam", "pipemare_warmup", "local_greedy_blocks", "diloco_streams", "rows_backwards",
}  # fmt: skip


@pytest.mark.parametrize("name", mark_slow(sorted(VARIANTS), QUICK.__contains__))
def test_a_saved_state_goes_on_to_the_same_bits(name: str, tmp_path: Path) -> None:
    variant = VARIANTS[name]
    allowed = list_scopes(variant)
    weights: List[torch.Tensor] = []
    for scope in SCOPES:
        if scope not in allowed:
            with pytest.raises(BadInput, match="^clip"):
                Training(variant, scope, tmp_path).step(0)
            continue
        steps, weights_at_end = resume_everywhere(variant, scope, tmp_path)
        assert steps == ROUNDS.get(name, [1, 2, 3, 4, 5, 6])
        # else the norms that are clipped would show nothing
        assert not any(torch.equal(weights_at_end, other) for other in weights)
        weights.append(weights_at_end)
