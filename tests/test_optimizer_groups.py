"""Test optimizers by parameter group: each parameter in one group, settings by stage, the numbers
of optimizers by hand."""

from __future__ import annotations

import functools
import json
import math
from pathlib import Path
from typing import Any, Callable, Dict, List, Sequence

import pytest
import torch
from torch import nn

import ipu_pipe
from ipu_pipe.config.load import load_config
from ipu_pipe.data.text import TextData
from ipu_pipe.errors import BadInput
from ipu_pipe.report.memory import build_memory_table
from ipu_pipe.run.build import build
from ipu_pipe.update.optimizer import (
    Member,
    count_state_bytes,
    make_factory_by_group,
    make_groups,
    make_placeholder,
    spread_settings,
)
from tests.support.runs import read_state, read_summary
from tests.test_open_optimizers import HOW, are_weights_equal, make_labelled_data
from tests.test_update import make_staged_model

pytestmark = pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="needs torch.optim.Muon")

MUON = {"ndim": 2, "name": "torch.optim.Muon", "lr": 0.02, "args": {"weight_decay": 0.0}}
GROUPS = [
    {"match": ["0.*"], "name": "adamw", "lr": 0.01},
    MUON,
    {"name": "sgd", "lr": 0.1, "momentum": 0.9},
]


def make_grouped_model() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(
        nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 6), nn.LayerNorm(6), nn.Linear(6, 2)
    )


def configure_groups(groups: Any, **keys: Any) -> Any:
    return ipu_pipe.configure(**{**HOW, "steps": 6, "optimizer": {"groups": groups}, **keys})


def train_groups(out: Path, groups: Any, **keys: Any) -> List[torch.Tensor]:
    arguments = {key: keys.pop(key, None) for key in ("resume_from", "lr_scheduler")}
    net, config = make_grouped_model(), configure_groups(groups, **keys)
    ipu_pipe.train(config, out, data=make_labelled_data(), model=net, quiet=True, **arguments)
    return [p.detach().clone() for p in net.parameters()]


def build_groups(groups: Any, lr_scheduler: Any = None, **keys: Any) -> Any:
    """Return the job of the model by groups."""
    config = configure_groups(groups, **keys)
    return build(config, make_grouped_model(), make_labelled_data(), lr_scheduler=lr_scheduler)


def train_by_hand(factors: Sequence[Callable[[int], float]]) -> List[torch.Tensor]:
    """Train the model with an optimizer and a LambdaLR for each group."""
    net, source = make_grouped_model(), make_labelled_data()
    others = [net[2].bias, *net[3].parameters(), net[4].bias]
    optimizers = [
        torch.optim.AdamW(net[0].parameters(), lr=0.01),
        torch.optim.Muon([net[2].weight, net[4].weight], lr=0.02, weight_decay=0.0),
        torch.optim.SGD(others, lr=0.1, momentum=0.9),
    ]
    schedulers = [torch.optim.lr_scheduler.LambdaLR(*pair) for pair in zip(optimizers, factors)]
    for k in range(6):
        x, y = source.train_batch(*divmod(k, 8), 4)
        nn.functional.cross_entropy(net(x), y).backward()
        for optimizer, scheduler in zip(optimizers, schedulers):
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
    return [p.detach() for p in net.parameters()]


def test_a_schedule_may_have_a_function_for_each_group(tmp_path: Path) -> None:
    """LambdaLR takes such a list for an optimizer's groups."""
    factors = [lambda k: 0.5**k, lambda k: 1.0 / (1 + k), lambda k: 0.0 if k < 2 else 1.0]
    make_scheduler = torch.optim.lr_scheduler.LambdaLR
    by_group = functools.partial(make_scheduler, lr_lambda=factors)
    ours = train_groups(tmp_path / "run", GROUPS, lr_scheduler=by_group)
    torch.testing.assert_close(ours, train_by_hand(factors), rtol=1e-6, atol=1e-8)
    # a group for which an earlier one leaves nothing
    idle = [*GROUPS[:2], {"name": "adamw", "lr": 0.1}, GROUPS[2]]
    build_groups(idle, functools.partial(make_scheduler, lr_lambda=[*factors, factors[0]]))


def test_groups_train_as_their_optimizers_do_by_hand(tmp_path: Path) -> None:
    expected = train_by_hand([lambda k: 1.0] * 3)
    assert are_weights_equal(train_groups(tmp_path / "run", GROUPS), expected)
    report = read_summary(tmp_path / "run")
    names = [group["name"].split(".")[-1] for group in report["optimizer"]["groups"]]
    assert names == ["AdamW", "Muon", "SGD"]
    # one copy of Muon's and SGD's parameters and two of AdamW's, as planned; and AdamW's two step counts
    planned, counts = build_memory_table(build_groups(GROUPS)), [4 * 2, 0]
    for stage, row, count in zip(report["stages"], planned, counts):
        assert stage["optimizer_bytes"] == row["optimizer_bytes"] + count


def test_a_run_resumes_bitwise_and_names_its_state_as_before(tmp_path: Path) -> None:
    keys = {"method": "pipemare", "method_args": {"t2": {}}, "checkpoint": {"every": 3, "keep": 9}}
    uninterrupted = train_groups(tmp_path / "a", GROUPS, **keys)
    train_groups(tmp_path / "b", GROUPS, steps=3, **keys)
    resumed = train_groups(tmp_path / "b", GROUPS, resume_from=3, **keys)
    assert are_weights_equal(resumed, uninterrupted)
    names = {
        "0.weight/exp_avg",
        "2.weight/momentum_buffer",
        "2.bias/momentum_buffer",
        "0.weight/t2_delta",
    }
    assert {f"optimizer/{name}" for name in names} <= read_state(tmp_path / "a").keys()
    with pytest.raises(BadInput, match="optimizer.groups: "):
        train_groups(tmp_path / "b", GROUPS[:1] + GROUPS[2:], resume_from=3, **keys)


# ---- which parameter is in which group


def test_the_parts_share_state_and_groups_and_a_stage_without_weights_has_one() -> None:
    net, part = make_staged_model()
    muon = functools.partial(torch.optim.Muon, lr=0.1)
    make = make_factory_by_group([muon, functools.partial(torch.optim.SGD, lr=0.1, momentum=0.5)])
    optimizer = make(make_groups(net, part, (), [Member(None, 2), Member()]))
    assert [group["stage"] for group in optimizer.param_groups] == [0, 0, 1, 1]
    net(torch.randn(2, 4)).sum().backward()
    optimizer.step()
    assert len(optimizer.state) == 6 and count_state_bytes(optimizer, 3) == [4 * 28, 4 * 20, 0]
    make([make_placeholder(2)]).step()


# ---- settings by stage


@pytest.mark.parametrize("values, expected", [
    ([0.5, 0.6, 0.7], [0.5, 0.6, 0.7]),
    ({"from": 0.5, "to": 1.0}, [1.0, 0.75, 0.5]),  # delays 4, 2, 0
    ({"from": 1.0, "to": 4.0, "over": "stages"}, [5.0, 3.0, 1.0]),
    ({"from": [0.5, 8.0], "to": [1.0, 8.0]}, [[1.0, 8.0], [0.75, 8.0], [0.5, 8.0]]),
])  # fmt: skip
def test_settings_by_the_stages_delay(values: Any, expected: List[Any]) -> None:
    assert [one["x"] for one in spread_settings({"x": values}, [4.0, 2.0, 0.0])] == expected
    if isinstance(values, dict):  # nothing changes without delay
        (alone,) = spread_settings({"x": values}, [0.0])
        assert alone["x"] == values["from"]


def test_a_rate_of_zero_on_the_first_stage_stops_no_other(tmp_path: Path) -> None:
    """Story: all rates were shares of the first group's."""
    rates = {"name": "sgd", "by_stage": {"lr": [0.0, 0.1]}}
    overrides = ["optimizer.momentum=null", f"optimizer={json.dumps(rates)}", "stages=2", "steps=1"]
    job = build(load_config("configs/mlp_digits.yaml", overrides))
    job.rules.step(0, None)
    assert {group["stage"]: group["lr"] for group in job.optimizer.param_groups} == {0: 0.0, 1: 0.1}


def test_settings_by_stage_leave_parameters_without_decay_so() -> None:
    """Story: their groups got the stage's weight_decay."""
    by_stage = {"weight_decay": [0.1, 0.2], "lr": [0.1, 0.3]}
    optimizer = {"name": "adamw", "lr": 0.1, "no_decay": "norms_and_biases", "by_stage": by_stage}
    job = build_with(optimizer)
    for _ in range(2):
        settings = [(g["stage"], g["weight_decay"], g["lr"]) for g in job.optimizer.param_groups]
        assert settings == [(0, 0.1, 0.1), (0, 0.0, 0.1), (1, 0.2, 0.3), (1, 0.0, 0.3)]
        job.rules.step(0, None)


def build_with(optimizer: Any) -> Any:
    config = ipu_pipe.configure(**{**HOW, "optimizer": optimizer, "method": "pipedream"})
    return build(config, make_grouped_model(), make_labelled_data())


# ---- refusals


@pytest.mark.parametrize("optimizer, key", [
    ({"groups": [MUON]}, "optimizer.groups: 0.bias, 2.bias, 3.weight, 3.bias and 1 more: "),
    ({"groups": [{"match": "9.*"}, {}]}, r"optimizer.groups.0.match: 9.\*: "),
    ({"groups": GROUPS, "momentum": 0.9}, "optimizer.momentum: 0.9: "),
    ({"groups": GROUPS, "name": "sgd"}, "optimizer.name: sgd: "),
    ({"name": "groups", "lr": None}, r"optimizer.groups: \[\]: "),
    ({"groups": [{"name": "groups"}]}, "optimizer.groups.0.name: groups: "),
    ({"groups": [{"name": "adamw", "momentum": 0.9}]}, "optimizer.groups.0.momentum: 0.9: "),
    ({"groups": [{"naem": "adamw"}]}, "optimizer.groups.0.naem: adamw: unknown key, nearest is name"),
    ({"groups": [{**MUON, "ndim": None}]}, "Muon only supports 2D"),
    ({"groups": [{"name": "torch.optim.Muno"}]}, "optimizer.groups.0.name: torch.optim:Muno: "),
    ({"by_stage": {"momentum": 0.9}}, "optimizer.by_stage.momentum: 0.9: "),
    ({"by_stage": {"momentum": {"from": 0.9, "to": "x"}}}, "optimizer.by_stage.momentum: "),
    ({"by_stage": {"momentum": [0.9]}}, r"optimizer.by_stage.momentum: \[0.9\]: "),
    ({"by_stage": {"momentum": [0.9, -1]}}, "Invalid momentum"),
    ({"by_stage": {"momentun": [0.9, 0.9]}}, "momentun"),
    ({"reference_batch_size": 8, "by_stage": {"lr": [0.1, 0.1]}}, "optimizer.reference_batch_size: 8: "),
])  # fmt: skip
def test_groups_and_settings_that_do_not_fit_are_reported_in_one_line(
    optimizer: Dict[str, Any], key: str
) -> None:
    with pytest.raises(BadInput, match=key) as error:
        build_with(optimizer)
    assert len(error.value.faults) == 1


def test_rules_refuse_the_group_for_which_they_are_not_defined() -> None:
    keys = {"method": "pipelined_backprop", "method_args": {"spike_compensation": {}}}
    with pytest.raises(BadInput, match="method_args.spike_compensation: Muon: "):
        build_groups(GROUPS[1:], **keys)
    with pytest.raises(BadInput, match="optimizer.groups: "):
        configure_groups(GROUPS, backend={"name": "poptorch"})


def test_rates_of_all_groups_scale_together() -> None:
    optimizer = configure_groups(GROUPS).optimizer.scale_rate(2)
    assert [group.lr for group in optimizer.groups] == [0.02, 0.04, 0.2] and optimizer.lr is None
    config = configure_groups([{"name": "torch.optim.Muon"}]).optimizer
    assert config.scale_rate(2) == config  # a default of PyTorch's stays


# ---- optimizers of the user's own, and the presets that need groups or settings by stage


def make_synthetic_text(**options: Any) -> TextData:
    """Return a text with as many distinct characters as Shakespeare's."""
    kinds = torch.randint(84, (6000,), generator=torch.Generator().manual_seed(0))
    return TextData(bytes((kinds + 33).tolist()), **options)


@pytest.mark.parametrize("name", ["nesterov", "xpipe", "delayed_muon", "basis_rotation"])
def test_presets_train(name: str, tmp_path: Path) -> None:
    data = "data={name: 'tests.test_optimizer_groups:make_synthetic_text', context: 8, subset: 512, test_subset: 32}"
    quick = [
        "model.args={width: 8, heads: 2, context: 8}", data, "steps=3", "log={tensorboard: false, trace: false}",
        "evaluate.every=0", "checkpoint=null",
    ]  # fmt: skip
    config = load_config(f"configs/async/{name}.yaml", quick)
    report = ipu_pipe.train(config, tmp_path / "run", quiet=True)
    assert math.isfinite(report["final"]["train_loss"]) and len(report["stages"]) == 8
    if name == "nesterov":  # mu + (versions - 1) (0.99 - mu) / P, versions - 1 = P-1-s
        job = build(config)
        momenta, others = zip(*(group["betas"] for group in job.optimizer.param_groups))
        assert others == (0.999,) * 8
        assert momenta == pytest.approx([0.9 + (7 - s) * 0.09 / 8 for s in range(8)])
