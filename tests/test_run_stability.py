"""Check what theory predicts of a run: curvature, the recurrences that a config stands for,
advice; and compare the emulator."""

from __future__ import annotations

import copy
import json
import math
from pathlib import Path
from typing import Any, Dict, List

import numpy as np
import pytest
import torch
from torch import nn

from ipu_pipe import begin_stage
from ipu_pipe.config.load import configure, load_config
from ipu_pipe.data import TensorData
from ipu_pipe.errors import BadInput
from ipu_pipe.job.record import Job
from ipu_pipe.job.stability import explain_divergence, list_inapplicable
from ipu_pipe.run.build import build
from ipu_pipe.run.stability import analyze_job, measure_curvature
from ipu_pipe.run.train import train
from ipu_pipe.stability.advice import StageDynamics, compute_margins, describe_margins
from ipu_pipe.stability.recurrences import make_delayed_sgd, make_pipemare
from ipu_pipe.update.rules import RULES, Rule
from tests.support.flows import train_updates
from tests.support.models import Composed
from tests.support.runs import DIGITS, assert_same, list_faults, read_json
from tools.experiments import stability as command
from tools.experiments.theory_figures import (
    compute_largest_curvature,
    load_regression,
    train_delayed,
)

# ---- curvature


def compute_last_column_loss(output: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return ((output[:, -1] - y) ** 2).mean() / 2


def average_output(output: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return output.mean()


def test_the_curvature_of_linear_regression_is_known() -> None:
    torch.manual_seed(0)
    x, y = torch.randn(50, 7, dtype=torch.float64), torch.randn(50, dtype=torch.float64)
    model = nn.Linear(7, 1, bias=False).double()
    arguments = (model, compute_last_column_loss, (x, y), [[model.weight]])
    curvature, few = (measure_curvature(*arguments, most, 1e-8) for most in (500, 3))
    values = np.linalg.eigvalsh((x.T @ x / 50).numpy())
    assert curvature.value == pytest.approx(values[-1], rel=1e-9)
    assert curvature.residual <= 1e-8 < few.residual and few.value < curvature.value
    assert 3 == few.iterations < curvature.iterations < 500


@pytest.mark.parametrize("sign, greatest, shares", [(1.0, 2, (1, 0)), (-1.0, 10, (0, 1))])
def test_the_curvature_is_the_greatest_positive_one(
    sign: float, greatest: float, shares: Any
) -> None:
    """A saddle has curvatures 2 along a, -10 along b, times a sign."""
    a, b = (nn.Parameter(torch.tensor([start])) for start in (0.3, 0.2))
    model, x = Composed(lambda m, x: sign * (m.a**2 - 5 * m.b**2) * x, a=a, b=b), torch.ones(4, 1)
    curvature = measure_curvature(model, average_output, (x, x), [[a], [b]], 500, 1e-5)
    assert curvature.value == pytest.approx(greatest, rel=1e-3)
    assert curvature.shares == pytest.approx(shares, abs=1e-6)
    with pytest.raises(BadInput, match="^model: "):
        measure_curvature(model, average_output, (x, x), [[b if sign > 0 else a]], 50)


def test_a_model_is_left_unchanged_and_measured_without_its_dropout() -> None:
    torch.manual_seed(1)
    model = nn.Sequential(
        nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.ReLU(inplace=True), nn.Linear(8, 3)
    )
    model.eval()
    before = copy.deepcopy(model.state_dict())
    x, y, state = torch.randn(16, 6), torch.arange(16) % 3, torch.get_rng_state()
    stages = [list(model[:2].parameters()), list(model[4].parameters())]
    work = (nn.functional.cross_entropy, (x, y), stages, 200, 1e-3)
    first, again = (measure_curvature(model, *work, discrepancy=True) for _ in range(2))
    assert first == again and sum(first.shares) == pytest.approx(1, rel=1e-4)
    assert_same(before, model.state_dict())
    assert not any(module.training for module in model.modules())
    assert torch.equal(state, torch.get_rng_state())
    assert all(p.grad is None for p in model.parameters())
    plain = nn.Sequential(*model[:2], *model[3:]).train()
    assert measure_curvature(plain, *work).value == pytest.approx(first.value, rel=1e-4)


def test_attention_can_be_differentiated_twice() -> None:
    torch.manual_seed(2)
    model = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    x, weights = torch.randn(3, 5, 8), [list(model.parameters())]
    loss = nn.functional.mse_loss
    assert measure_curvature(model, loss, (x, x.flip(0)), weights, 40, 0.1).value > 0


def test_the_discrepancy_is_that_of_the_backwards_weights_alone() -> None:
    """Compare with f = (a b x - y)^2 / 2, whose discrepancy is known.

    Of the gradient (r b x, r a x), r = a b x - y, the backward reads only b anew: the derivative of
    the first entry by b is then r x.
    """
    a, b, x, y = 1.2, 0.7, 1.5, 0.4
    weights = [nn.Parameter(torch.tensor(one, dtype=torch.float64)) for one in (a, b)]
    model = Composed(lambda m, x: m.b * (m.a * x), a=weights[0], b=weights[1])
    data = torch.tensor([[x]], dtype=torch.float64), torch.tensor([y], dtype=torch.float64)
    stages = [[weight] for weight in weights]
    curvature = measure_curvature(
        model, compute_last_column_loss, data, stages, 500, 1e-9, discrepancy=True
    )
    r = a * b * x - y
    mixed = r * x + a * b * x * x
    values, vectors = np.linalg.eigh([[b * b * x * x, mixed], [mixed, a * a * x * x]])
    v = vectors[:, -1]
    assert curvature.value == pytest.approx(values[-1])
    assert curvature.shares == pytest.approx(tuple(v**2))
    assert curvature.discrepancy == pytest.approx(-v[0] * v[1] * r * x / values[-1], rel=1e-6)


# ---- a run that theory predicts exactly


def make_part(column: int, start: float) -> nn.Module:
    """Return a module that adds its weight's part of one direction to the last column."""

    def forward(m: Any, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([x[:, :-1], x[:, -1:] + x[:, column : column + 1] * m.weight], dim=1)

    return Composed(forward, weight=nn.Parameter(torch.tensor([start])))


SHARES = (0.4, 0.1, 0.3, 0.2)  # of a direction with curvature 3


def make_one_direction_job(lr: float, **keys: Any) -> Job:
    """Return the job of four stages on a loss with one direction; all samples are equal."""
    columns = torch.tensor([3 * share for share in SHARES]).sqrt()
    parts: List[nn.Module] = [make_part(i, float(column)) for i, column in enumerate(columns)]
    model = nn.Sequential(parts[0], *map(begin_stage, parts[1:]))
    x = torch.cat([columns, torch.zeros(1)]).repeat(64, 1).double()
    y = torch.zeros(64, dtype=torch.float64)
    config = configure(**{
        "optimizer": {"name": "sgd", "lr": lr, "momentum": 0.8}, "micro_batch_size": 1, "gradient_accumulation": 1,
        "steps": 3000, "precision": "float64", "evaluate": {"every": 0}, "log": {"tensorboard": False}, **keys,
    })  # fmt: skip
    return build(
        config, model=model, data=TensorData((x, y), (x[:4], y[:4])), loss=compute_last_column_loss
    )


RUNS: Dict[str, Dict[str, Any]] = {
    "gpipe": {"method": "gpipe"},
    "pipedream": {"method": "pipedream"},
    "2BW": {"method": "pipedream_2bw", "gradient_accumulation": 4},
    "PB, Nesterov": {
        "method": "pipelined_backprop",
        "optimizer": {"name": "sgd", "lr": 0.1, "momentum": 0.8, "nesterov": True},
    },
    "PB, both": {
        "method": "pipelined_backprop",
        "method_args": {
            "weight_prediction": {"form": "difference"},
            "spike_compensation": {"scale": 2.0},
            "gradient_shrinking": {"factor": 0.7},
        },
    },  # fmt: skip
    "SpecTrain": {"method": "spectrain"},
    "PipeMare, T1": {"method": "pipemare", "method_args": {"t1": {"anneal_updates": 10**8}}},
    "constant delay": {"method": "pipedream", "method_args": {"constant_delay": {"updates": 5}}},
}


@pytest.mark.parametrize("name", RUNS)
def test_the_emulator_diverges_above_the_predicted_rate(name: str) -> None:
    """The stages share one direction, so that the largest stable rate of the whole is exact.

    A tenth below that rate the loss falls from one stretch of updates to the next; a tenth above it
    rises.
    """
    keys = RUNS[name]
    analysis = analyze_job(make_one_direction_job(0.1, **keys), samples=4, iterations=20)
    assert analysis["curvature"]["value"] == pytest.approx(3)
    assert analysis["curvature"]["discrepancy"] in (None, 0)
    assert [s["share"] for s in analysis["stages"]] == pytest.approx(SHARES)
    limit = analysis["whole"]["largest_stable_rate"]
    assert analysis["whole"]["margin"] == pytest.approx(limit / 0.1)
    optimizer = keys.get("optimizer", {"name": "sgd", "momentum": 0.8})
    for factor in (0.9, 1.1):
        settings = {**keys, "optimizer": {**optimizer, "lr": factor * limit}}
        job = make_one_direction_job(0.1, **settings)
        flow, results = train_updates(job, 90 if name in ("2BW", "gpipe") else 180)
        losses = [result.loss for result in results]
        flow.engine.close()
        third = len(losses) // 3
        assert (max(losses[-third:]) > max(losses[third:-third])) == (factor > 1)


@pytest.mark.parametrize("key", ["delay_compensation", "gap_aware", "error_feedback", "unknown"])
def test_a_rule_that_the_theory_does_not_cover_is_refused(
    key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Story: limits with delay_compensation were printed, as if the rule was not there."""
    job = make_one_direction_job(
        0.1, method="pipedream", method_args={} if key == "unknown" else {key: {}}
    )
    if key == "unknown":  # a rule that is added to the table
        rule = Rule(key, "", "", set_by=lambda *_: {}, gradient=lambda _, gradients: gradients)
        monkeypatch.setitem(RULES, key, rule)
    (fault,) = list_inapplicable(job)
    assert fault.startswith(f"method_args.{key}: ")


def test_the_prediction_by_the_optimizers_step_has_the_limit_of_that_by_velocity() -> None:
    """Story: with SGD both train alike, but the limit of one was computed for differences of weights."""
    limits = []
    for form in ("optimizer", "velocity"):
        args = {"weight_prediction": {"form": form}, "spike_compensation": {"scale": 2.0}}
        job = make_one_direction_job(0.1, method="pipelined_backprop", method_args=args)
        limits.append(analyze_job(job, curvature=3.0)["stages"])
    assert limits[0] == limits[1]


def test_a_diverged_run_of_single_stages_is_not_told_to_take_a_rule() -> None:
    """Story: the error advised t1, which the method refuses."""
    job = make_one_direction_job(0.1, method="randomized_pipedream")
    assert "stage 0 tolerates" in explain_divergence(job, 9)
    assert "t1" not in explain_divergence(job, 9)


def test_each_stage_is_distinguished_by_its_delay_and_curvature() -> None:
    job = make_one_direction_job(0.1, method="pipelined_backprop")
    stages = analyze_job(job, samples=4, iterations=20, by_stage=True)["stages"]
    assert [s["delay"] for s in stages] == [6, 4, 2, 0] and [s["rate"] for s in stages] == [0.1] * 4
    assert [s["curvature"] for s in stages] == pytest.approx([3 * share for share in SHARES])
    for s, share in zip(stages, SHARES):
        dynamics = StageDynamics(0, make_delayed_sgd(s["delay"], 0.8), 0.1, 3 * share)
        (alone,) = compute_margins([dynamics])
        assert s["margin"] == pytest.approx(alone.margin)
        assert s["largest_stable_rate"] == pytest.approx(alone.margin * 0.1)


def test_rates_are_the_greatest_of_the_run_after_its_rules() -> None:
    keys = {"method": "pipemare", "method_args": {"t1": {"anneal_updates": 100}}, "steps": 200,
            "lr_schedule": {"name": "step", "milestones": [1], "gamma": 0.01}}  # fmt: skip
    analysis = analyze_job(make_one_direction_job(0.2, **keys), curvature=3.0)
    assert analysis["curvature"] == {"value": 3.0, "how": "given"} and analysis["whole"] is None
    stages = analysis["stages"]
    assert [s["delay"] for s in stages] == [7, 5, 3, 1]
    # the last update at the full rate: 64 of an epoch
    power = 1 - 63 / 100
    assert [s["rate"] for s in stages[:3]] == pytest.approx([0.2 / d**power for d in (7, 5, 3)])
    assert analysis["rates_of_update"] == [63, 63, 63, 0]
    assert stages[0]["margin"] < min(remedy["margin"] for remedy in stages[0]["raised_by"])


# ---- advice


def test_advice_names_the_worst_stage_and_what_raises_its_limit() -> None:
    stages = [
        StageDynamics(s, make_delayed_sgd(d, 0.9), 0.05, 2.0) for s, d in enumerate((6, 4, 2, 0))
    ]
    margins = compute_margins(stages)
    changes = {r.change: r for r in margins[0].remedies}
    assert set(changes) == {
        "t1", "spike_compensation", "weight_prediction", "spike_compensation + weight_prediction",
        "momentum 0 at lr / (1 - momentum)",
    }  # fmt: skip
    assert changes["t1"].margin == pytest.approx(6 * margins[0].margin)
    assert not margins[-1].remedies  # this stage has no delay
    assert [v.margin < 1 for v in margins] == [True, True, True, False]
    first = describe_margins(margins)[0]
    assert first.startswith("3 of 4 stages") and "stage 0 (delay 6 updates)" in first
    # a stage without weights
    assert compute_margins([StageDynamics(0, make_delayed_sgd(3), 0.1, 0.0)])[0].margin == math.inf


def test_against_discrepancy_t2_and_stashing_are_advised() -> None:
    (result,) = compute_margins([StageDynamics(0, make_pipemare(10, 0, 5.0), 0.05, 1.0)])
    by_name = {r.change: r.largest_rate for r in result.remedies}
    assert by_name["stash"] == pytest.approx(2 * math.sin(math.pi / 42))
    assert result.largest_rate < by_name["t2"] < by_name["stash"]


# ---- the command


def run_stability_command(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    command.main(arguments)
    return capsys.readouterr().out


def test_a_run_that_diverged_is_not_called_stable(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Story: the command called a run's rate 1/2.64 of the limit, by the curvature of its initial
    weights; the run had diverged.
    """
    changes = "method=gpipe optimizer.lr=2 allow_nonfinite=true steps=40 log.tensorboard=false checkpoint.every=20"
    summary = train(load_config(DIGITS, changes.split()), tmp_path, quiet=True)
    assert summary["diverged_after"] is not None and "diverged" in summary["finding"]
    arguments = ["--samples", "64", "--iterations", "20"]
    for name in (str(tmp_path), str(tmp_path / "config.yaml")):
        printed = run_stability_command(capsys, name, *arguments)
        assert f"diverged after update {summary['diverged_after']}" in printed
        assert "no stage exceeds" not in printed and "  checkpoint of update 20: " in printed
    content = json.loads(run_stability_command(capsys, str(tmp_path), *arguments, "--json"))
    greatest = max(point.get("curvature", 0) for point in content["checkpoints"])
    assert content["curvature"]["value"] == greatest


@pytest.mark.parametrize("arguments, line", [
    (["nowhere.yaml"], "nowhere.yaml"),
    (["pipemare_5"], "did you mean pipemare_5"),
    (["pb_3", "--set", "a=1"], "--set: "),
    ([DIGITS, "--set", "optimizer.name=adam", "optimizer.momentum=null"], "optimizer.name: adam: "),
    ([DIGITS, "--set", "method=local_greedy"], "method: local_greedy: trains each block by its own loss"),
    ([DIGITS, "--set", "method=randomized_pipedream"], "method: randomized_pipedream: "),
    ([DIGITS, "--set", "method_args.hogwild={max: 9}"], "method_args.hogwild: delays are drawn"),
    ([DIGITS, "--curvature", "-1"], "-1: "),
    ([DIGITS, "--samples", "1000000"], "--samples: 1000000: "),
    ([DIGITS, "--by-stage", "--curvature", "2"], "--by-stage: "),
    ([DIGITS, "--out", "x"], "--out: x: "),
])  # fmt: skip
def test_bad_input_is_a_line(arguments: List[str], line: str) -> None:
    (fault,) = list_faults(command.main, arguments)
    assert line in fault


def test_figures_are_data_and_pictures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["pipemare_16", "pb_3", "--out", str(tmp_path), "--json"]
    content = json.loads(run_stability_command(capsys, *arguments))
    assert list(content) == ["pipemare_16", "pb_3"]
    assert read_json(tmp_path / "pb_3.json") == content["pb_3"]
    assert all((tmp_path / f"{name}.png").read_bytes()[:4] == b"\x89PNG" for name in content)
    lines = {line["label"]: line for line in content["pipemare_16"]["panels"][0]["lines"]}
    assert max(lines["no discrepancy"]["y"]) < max(lines["the same, T2 (D = 0.1)"]["y"])
    output = run_stability_command(capsys)
    assert "pb_12" in output and "pipemare_18" in output


def test_delayed_regression_diverges_along_lemma_1() -> None:
    data = load_regression()
    limit = 2 / compute_largest_curvature(data) * math.sin(math.pi / 42)
    whole = data._replace(batch=256)  # less noise
    delayed = train_delayed(whole, np.array([0.7, 1.4]) * limit, np.array([10, 20]), 2500)
    assert np.isfinite(delayed).tolist() == [[True, False], [False, False]] and delayed[0, 0] < 0.3
