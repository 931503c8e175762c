"""Check that a saved state resumes bitwise: every method of the table, every scope of clipping,
every step that may drain."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any, Dict, Iterable, List, NamedTuple, Optional, Tuple

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import ipu_pipe
from ipu_pipe.schedule.methods import METHODS
from tests.support.slow import mark_slow

UPDATES = 7
# norms of earlier updates, which clip later ones, begin anew after a drain, and are late by up to 7 updates
UPDATES_OF_DELAYED_NORMS = 15
# a run that saves at several steps is resumed from each of them
SAVES = [1, 4]
# other steps of an object that loads a state, a multiple of the rounds below
USED = 6
# two devices of two stages in PyTorch's format, with backwards in another order than the microbatches'
BACKWARDS = """\
0F0,0F1,0F2,0F3,,0B3,0B0,0B1,0B2
,1F0,1F1,1F2,1F3,1B3,1B0,1B1,1B2
"""


class Variant(NamedTuple):
    """A method with arguments of `Pipeline`."""

    method: str
    keys: Dict[str, Any] = {}
    scope: Optional[str] = None
    optimizer_name: str = "sgd"
    stages: Any = ["2", "4", "6"]


def make_variant(method: str, scope: Optional[str] = None, **args: Any) -> Variant:
    return Variant(method, {"method_args": args}, scope)


ADAPTIVE = {"scale": 0.1, "adaptive": True}
# each with state of its own
VARIANTS: Dict[str, Variant] = {
    **{name: Variant(name) for name, m in METHODS.items() if m.order is None and name != "rows"},
    "zbv": Variant("zbv", scope="global"),
    "gpipe_stage": Variant("gpipe", scope="stage"),
    "gpipe_replicas": Variant("gpipe", {"replicas": 2, "recompute": True}),
    "pipedream_delayed": Variant("pipedream", {"microbatches": 2}, "delayed_global"),
    "pipemare_t1_t2": make_variant("pipemare", "delayed_global", t1={"anneal_updates": 5}, t2={"decay": 0.5}),
    "pipemare_warmup": Variant("pipemare", {"warmup": 3, "method_args": {"t2": {}}}, "stage"),
    "pipemare_hogwild": make_variant("pipemare", hogwild={"max": 4, "mean": 2}),
    "pipemare_recompute": make_variant("pipemare", recompute={"segments": 2}),
    "pb_sc_lwp": make_variant(
        "pipelined_backprop", "stage", spike_compensation={}, weight_prediction={"form": "velocity"}
    ),
    "pb_difference": make_variant("pipelined_backprop", weight_prediction={"form": "difference"}),
    "pb_feedback": make_variant("pipelined_backprop", error_feedback={}),
    "pb_split": Variant("pipelined_backprop", {"method_args": {"split_backward": True}, "stages_per_device": 2}),
    "pipedream_adaptive": make_variant("pipedream", delay_compensation=ADAPTIVE),
    "pipedream_gap": make_variant("pipedream", gap_aware={"decay": 0.5}),
    "pipedream_weights": Variant("pipedream", {"loss_weight": lambda y: float((y == 0).sum()), "microbatches": 2}),
    "pipedream_mixed": Variant("pipedream", {"precision": "bfloat16_mixed"}, optimizer_name="adam"),
    "pipedream_2bw_replicas": Variant("pipedream_2bw", {"replicas": 2}, "stage"),
    "local_greedy_blocks": make_variant("local_greedy", block_rates=[1, 2, 1, 1], block_accumulation=[1, 2, 1, 3]),
    "local_greedy_adam": Variant("local_greedy", {}, "stage", "adam"),
    "local_sgd_adam": Variant("local_sgd", {"method_args": {"local_steps": 3, "replicas": 2}}, "stage", "adam"),
    "diloco": make_variant("local_sgd", local_steps=3, outer={"name": "sgd", "lr": 0.7, "momentum": 0.9}),
    "diloco_streams": make_variant(
        "local_sgd", local_steps=4, outer={"name": "sgd", "fragments": 2, "delay": 1, "mix": 0.5, "momentum": 0.9}
    ),
    "randomized_nag": make_variant("randomized_pipedream", "stage", nag=0.5),
    "rows_backwards": Variant("rows", {"rows": BACKWARDS}, stages=["4"]),
}  # fmt: skip


def make_float_batch(k: int, samples: int = 24) -> Tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(k)
    x = torch.randn(samples, 4, generator=generator, dtype=torch.float64)
    return x, torch.randint(0, 3, (samples,), generator=generator)


class Training:
    """Training loop of one's own over a variant, with a scheduler; it saves and loads its parts
    as in docs/own_loop.md."""

    def __init__(self, variant: Variant, folder: Path) -> None:
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
        clip = None if variant.scope is None else (0.1, variant.scope)
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

    def load(self, content: bytes, names: Iterable[str]) -> None:
        states = torch.load(io.BytesIO(content), weights_only=True)
        for name in names:
            self.parts[name].load_state_dict(states[name])
        # the pipeline's state has the settings of the optimizer's groups, before the first step
        rate = self.optimizer.param_groups[0]["lr"]
        assert rate == states["optimizer"]["param_groups"][0]["lr"]

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


# steps that may drain, in rounds of an outer optimizer or of accumulating blocks
ROUNDS = {"diloco": [3, 6], "diloco_streams": [2, 4], "local_greedy_blocks": [6]}
# one of each kind of state, which `make test` runs
QUICK = {"pipedream", "pipemare", "local_greedy_blocks", "diloco_streams", "rows_backwards"}


@pytest.mark.parametrize("name", mark_slow(sorted(VARIANTS), QUICK.__contains__))
def test_a_saved_state_goes_on_to_the_same_bits(name: str, tmp_path: Path) -> None:
    """A run that resumes from a saved state ends like the run that saved it."""
    variant, saves = VARIANTS[name], ROUNDS.get(name, SAVES)
    count = UPDATES_OF_DELAYED_NORMS if variant.scope == "delayed_global" else UPDATES
    straight = Training(variant, tmp_path)
    files: Dict[int, bytes] = {}
    for k in range(count):
        straight.step(k)
        if k + 1 in saves:
            files[k + 1] = straight.save()
    expected = straight.end()
    # a new object before its first step, and one that has made other steps
    for at, before in [*((at, 0) for at in saves), (saves[0], USED)]:
        resumed = Training(variant, tmp_path)
        for k in range(before):
            resumed.step(k + 50)
        # a scheduler computes its rate from the one in the group
        resumed.load(files[at], resumed.parts if before else ("pipe", "scheduler"))
        resumed.losses.clear()
        for k in range(at, count):
            resumed.step(k)
            if k + 1 in files:
                resumed.save()
        assert_same_ends(expected, resumed.end())
        assert resumed.losses == [loss for loss in straight.losses if loss[0] >= at]
