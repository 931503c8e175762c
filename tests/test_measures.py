"""Test the measures of experiments: angles of block gradients, fit, filters, random labels."""

from __future__ import annotations

from pathlib import Path
from typing import Any, List, Optional, Sequence, Tuple

import numpy as np
import pytest
import torch
from torch import nn

from ipu_pipe.config.load import load_config
from ipu_pipe.config.sections import InitFrom
from ipu_pipe.data import load_data, sets
from ipu_pipe.job.evaluation import evaluate
from ipu_pipe.local.blocks import BlockedModel, get_blocks
from ipu_pipe.local.structures import make_blocks
from ipu_pipe.model.loss import SumOfLosses
from ipu_pipe.run.build import build
from ipu_pipe.run.train import train
from ipu_pipe.schedule.methods import Structure
from tests.staged_models import join_stages, make_mlp_stages
from tests.support.models import Composed
from tests.support.runs import DIGITS, list_faults
from tools.experiments import measures
from tools.experiments.experiment import Request
from tools.experiments.measures import (
    MeasureOptions,
    compute_angle,
    compute_block_angles,
    observe_draws,
)
from tools.experiments.training_grids import load_experiment

cross_entropy = nn.functional.cross_entropy
LOSS = SumOfLosses(cross_entropy)
STRUCTURES = {
    "greedy": Structure(), "overlapping": Structure(overlap=1), "twice": Structure(overlap=2),
    "chunked": Structure(blocks=("2",)), "whole": Structure(blocks=1), "last": Structure(layers=1),
}  # fmt: skip


def drift(m: Any, x: torch.Tensor) -> torch.Tensor:
    """Read and change a buffer in every training forward."""
    if m.training:
        m.factor = m.factor * 1.5
    return x * m.factor  # type: ignore[no-any-return]


def make_measured_layers(structure: Structure) -> List[nn.Module]:
    """Return four blocks in a row, with running statistics and dropout.

    Where each block runs once, one has a buffer that changes and is read.
    """
    torch.manual_seed(3)
    start = torch.ones((), dtype=torch.float64)
    drifting = nn.Identity() if structure.overlap else Composed(drift, factor=start)
    layers = (
        (nn.Linear(12, 10), nn.BatchNorm1d(10), nn.Tanh()),
        (nn.Linear(10, 9), nn.Dropout(0.3), nn.Tanh()),
        (nn.Linear(9, 8), drifting, nn.BatchNorm1d(8), nn.ReLU(inplace=True)),
        (nn.Dropout(0.2), nn.Linear(8, 4)),
    )
    return [nn.Sequential(*one).double() for one in layers]


def make_measured_batch() -> Tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(4)
    return torch.randn(6, 12, generator=generator, dtype=torch.float64), torch.arange(6) % 4


def make_measured_model(structure: Structure, stages: Sequence[nn.Module] = ()) -> BlockedModel:
    model = join_stages(list(stages or make_measured_layers(structure)))
    return make_blocks(model, make_measured_batch()[0], structure, None)[0]


# ---- angles


def measure_angles(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> List[Optional[float]]:
    return compute_block_angles(model, LOSS, x, y, observe_draws(model, x))


@pytest.mark.parametrize("name", STRUCTURES)
def test_the_last_blocks_local_gradient_is_the_true_one_and_others_are_not(name: str) -> None:
    angles = measure_angles(make_measured_model(STRUCTURES[name]), *make_measured_batch())
    assert angles[-1] == 0.0 and all(angle is None or angle > 1 for angle in angles[:-1])
    # frozen blocks have no angle
    assert (None in angles) == (name == "last") and (len(angles) == 1) == (name == "whole")


def flatten_gradients(loss: torch.Tensor, layer: nn.Module) -> torch.Tensor:
    grads = torch.autograd.grad(loss, list(layer.parameters()), retain_graph=True)
    return torch.cat([g.flatten() for g in grads])


@pytest.mark.parametrize("overlap", [0, 1])
def test_angles_are_those_of_gradients_written_out(overlap: int) -> None:
    torch.manual_seed(3)
    stages, (x, y) = [stage.double() for stage in make_mlp_stages()], make_measured_batch()
    model = make_measured_model(Structure(overlap=overlap), stages)
    blocks: Any = get_blocks(model)
    # of each layer's weights and biases, by the blocks that contain it
    local: List[List[torch.Tensor]] = [[] for _ in stages]
    entered = [x]
    for stage in stages:
        entered.append(stage(entered[-1]).detach())
    for j in range(4):
        first, head = max(0, j - overlap), blocks.get_head(j)
        block = nn.Sequential(*stages[first : j + 1], head or nn.Identity())
        loss = cross_entropy(block(entered[first]), y)
        for i in range(first, j + 1):
            local[i].append(flatten_gradients(loss, stages[i]))
    loss = cross_entropy(nn.Sequential(*stages)(x), y)
    for i, result in enumerate(measure_angles(model, x, y)):
        true, mean = flatten_gradients(loss, stages[i]), torch.stack(local[i]).mean(0)
        cosine = float(mean @ true / mean.norm() / true.norm())
        assert result is not None and np.cos(np.radians(result)) == pytest.approx(cosine, abs=1e-12)


@pytest.mark.parametrize("name", ["greedy", "twice", "chunked"])
def test_a_probe_leaves_everything_as_it_was(name: str) -> None:
    model, (x, y) = make_measured_model(STRUCTURES[name]), make_measured_batch()
    torch.autograd.backward([cross_entropy(output, y) for output in model(x)])
    blocks: Any = get_blocks(model)
    blocks.average_duplicates()
    model.eval()
    next(model.children()).train()
    gradients = [p.grad for p in model.parameters()]

    def take_all() -> List[Any]:
        modes = [module.training for module in [*model.modules(), blocks.model]]
        hooks = [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()]
        tensors = [*model.state_dict().values(), *gradients, x, torch.get_rng_state()]
        return [modes, hooks, *(None if t is None else t.tolist() for t in tensors)]

    before = take_all()
    first = measure_angles(model, x, y)
    assert take_all() == before
    assert all(p.grad is g for p, g in zip(model.parameters(), gradients))
    torch.rand(3)
    assert measure_angles(model, x, y) == first, "the draws are the probe's own"


@pytest.mark.parametrize(
    ("angles", "rises", "expected"),
    [
        ([60.0, 50.0, 40.0], 1, ["shown", "shown"]),
        ([91.0, 95.0, 99.0], 0, ["contradicted", "contradicted"]),
        ([None, 50.0, 40.0], 0, ["cannot be told", "cannot be told"]),
        ([120.0], 0, ["contradicted", "cannot be told"]),
    ],
)
def test_angles_are_judged_by_the_second_half_of_the_updates(
    angles: List[Any], rises: int, expected: List[str]
) -> None:
    rows = []
    for seed in range(3):
        first = angles[0] and angles[0] + seed * rises
        later = [[update, first, *angles[1:], 0.0] for update in (50, 100)]
        curve = [[0, 170.0, 170.0, 170.0, 0.0], *later]
        rows.append({"label": "greedy", "seed": seed, "step": 100, "curve": curve})
    verdicts = measures.judge_angles(rows)
    assert [verdict.verdict for verdict in verdicts] == expected
    if rises:
        assert [verdict.difference for verdict in verdicts] == pytest.approx([29, 10.5])


@pytest.mark.parametrize(
    ("a", "b", "degrees"),
    [
        ([3.0, 0.0], [0.0, 2.0], 90),
        ([1.0, 0.0], [-5.0, 0.0], 180),
        ([1.0, 0.0], [1.0, 1e-9], np.degrees(1e-9)),  # whose cosine is 1
        ([0.0, 0.0], [1.0, 0.0], None),
        ([float("nan"), 0.0], [1.0, 0.0], None),
    ],
)
def test_angles_of_vectors(a: List[float], b: List[float], degrees: Optional[float]) -> None:
    angle = compute_angle(torch.tensor(a).double(), torch.tensor(b).double())
    assert angle is degrees or angle == pytest.approx(degrees)


# ---- the fit of training samples, and filters


def test_training_samples_are_evaluated_without_augmentation_by_the_final_output(
    tmp_path: Path,
) -> None:
    """The curve has means over updates; the final weights are those without a measure."""
    config = load_config(DIGITS, [
        "data.augment=true", "data.subset=32", "data.test_subset=100", "steps=10", "stages=4", "optimizer.lr=0.1",
        "micro_batch_size=8", "method=local_greedy", "backend.threads=1",
    ])  # fmt: skip
    fine, coarse = (
        measures.measure_fit(config, tmp_path, MeasureOptions(name="fit", every=every), False)
        for every in (1, 5)
    )
    losses = [loss for _, loss, _ in fine["curve"]]
    assert [point[0] for point in coarse["curve"]] == [5, 10] and losses[-1] < losses[0]
    assert coarse["curve"][1][1] == pytest.approx(sum(losses[5:]) / 5)
    assert coarse["values"] == fine["values"] and fine["values"]["blocks"] == 4
    train(config, tmp_path / "run", quiet=True)
    changed = {
        "data": config.data.model_copy(update={"augment": False}),
        "init_from": InitFrom(path=str(tmp_path / "run")),
    }
    job = build(config.model_copy(update=changed))
    job.data.test = job.data.train
    expected = evaluate(job)[-1]
    assert (fine["values"]["train loss"], fine["final"]) == (expected.loss, expected.accuracy)


def test_filters_are_the_first_layers_each_between_its_own_extremes() -> None:
    filters = np.random.default_rng(0).normal(size=(5, 3, 2, 4))
    filters[2] = 7.0
    image = measures.make_filters_image(filters)
    assert image.shape == (2 * 3 + 1, 3 * 5 + 1, 3) and (image[4:, 11:] == 1).all()
    for i, one in enumerate(filters):
        tile = image[i // 3 * 3 + 1 :, i % 3 * 5 + 1 :][:2, :4].transpose(2, 0, 1)
        expected = 0.5 if i == 2 else (one - one.min()) / (one.max() - one.min())
        assert tile == pytest.approx(np.broadcast_to(expected, tile.shape))


# ---- experiments

EXPERIMENT = """
title: Title
source: nobody
base:
  model: {entry: models.mlp:mlp}
  data: {name: digits, subset: 100, test_subset: 50}
  method: local_greedy
  stages: 4
  micro_batch_size: 10
  steps: 4
  log: {every: 1}
  backend: {threads: 1}
seeds: [0, 1]
rows: {sgd: {method: local_sgd, method_args: {replicas: 2}}, greedy: {}, last: {method: last_layers, method_args: {layers: 2}}}
"""


def run_experiment(folder: Path, measure: str, **keys: Any) -> Any:
    (folder / "one.yaml").write_text(f"{EXPERIMENT}measure: {measure}\n")
    request = Request(folder / "runs", seeds=[0], jobs=2, say=lambda text: None, **keys)
    return load_experiment(folder / "one.yaml").run(request)


@pytest.mark.slow
@pytest.mark.parametrize("measure, pictures", [
    ("{name: angles, every: 2, samples: 16}", ["angles.png"]),
    ("{name: fit}", ["accuracy.png", "training.png"]),
    ("{name: training_loss, window: 2}", ["loss_by_epoch.png", "loss_by_time.png"]),
])  # fmt: skip
def test_each_measure_writes_its_results(measure: str, pictures: List[str], tmp_path: Path) -> None:
    outcome = run_experiment(tmp_path, measure, rows=["greedy", "last"])
    written = [path.name for path in outcome.write(tmp_path)]
    assert written == ["results.json", "table.md", *pictures]
    assert [curve["label"] for curve in outcome.findings.curves] == ["greedy", "last"]
    assert all(row["final"] is not None and row["step"] == 4 for row in outcome.results["rows"])


@pytest.mark.slow
@pytest.mark.parametrize(("window", "points"), [(4, 2), (1000, 1)])
def test_a_window_of_microbatches_counts_those_of_every_replica(
    window: int, points: int, tmp_path: Path
) -> None:
    """Story: LocalSGD's windows were longer than the run, and its rows were called diverged."""
    measure = f"{{name: training_loss, window: {window}}}"
    findings = run_experiment(tmp_path, measure, rows=["sgd"]).findings
    assert len(findings.curves[0]["curve"]) == points
    assert findings.results["rows"][0]["final"] is not None


@pytest.mark.parametrize("measure, fault", [
    ("{name: angle}", "measure.name: angle: "),
    ("{name: fit, every: 0}", "measure.every: 0: "),
    ("{name: filters, tensor: fc1.weight}", "measure.tensor: fc1.weight: "),
    pytest.param("{name: angles, samples: 101}", "measure.samples: 101: ", marks=pytest.mark.slow),
])  # fmt: skip
def test_bad_measures_are_refused(measure: str, fault: str, tmp_path: Path) -> None:
    assert fault in str(list_faults(run_experiment, tmp_path, measure, rows=["greedy"]))


# ---- random labels


def test_random_labels_are_drawn_by_the_seed_alone() -> None:
    plain, drawn, other_seed, few = (
        load_data("digits", random_labels=random, **keys)
        for random, keys in ((False, {}), (True, {}), (True, {"seed": 1}), (True, {"subset": 50, "test_subset": 20}))
    )  # fmt: skip
    pairs = [(other_seed.train[1], drawn.train[1]), (drawn.train[1][:360], drawn.test[1])]
    for part in ("train", "test"):
        (x, real), (y, labels) = getattr(plain, part), getattr(drawn, part)
        first = getattr(few, part)[1]
        assert torch.equal(x, y) and labels.dtype == real.dtype == torch.int64
        assert sorted(set(labels.tolist())) == list(range(10))
        assert torch.equal(first, labels[: len(first)]) and len(first) < 60
        pairs.append((labels, real))
    # chance: of 1437 and 360, 0.1 +- 0.008 and 0.016
    assert all(0.05 < (a == b).float().mean() < 0.15 for a, b in pairs)
    # neither images nor labels matter
    x, y = plain.train
    assert torch.equal(sets._draw_labels((x.flip(0), y * 0), 0, "train")[1], drawn.train[1])


@pytest.mark.parametrize("name, value, message", [
    ("digits", 1, "data.random_labels: 1: must be true or false"),
    ("synthetic", True, "data.random_labels: True: "),
    ("shakespeare", True, "data.random_labels: True: unknown key for shakespeare"),
])  # fmt: skip
def test_random_labels_are_refused_where_they_have_no_meaning(
    name: str, value: Any, message: str
) -> None:
    assert message in str(list_faults(load_data, name, random_labels=value))
