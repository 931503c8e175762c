"""Test jobs that are built from shapes to be analyzed: their figures equal those of jobs with
numbers, and models that read numbers get them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from ipu_pipe.config.load import configure
from ipu_pipe.model.meta import move_to_meta, to_meta
from ipu_pipe.model.observation import observe_costs
from ipu_pipe.report.memory import build_memory_table
from ipu_pipe.report.run_text import format_plan
from ipu_pipe.run.build import build
from ipu_pipe.run.planning import build_for_planning
from models.transformer import transformer_lm
from tests.support.models import Composed
from tests.support.runs import list_faults

DATA = {"name": "synthetic", "shape": [3, 32, 32], "classes": 10, "subset": 32, "test_subset": 8}
LARGE = {"entry": "models.resnet:preact_resnet32", "args": {"classes": 10}}


def configure_large_model(**keys: Any) -> Any:
    """Return a config of a model with more numbers than `SMALL`."""
    return configure(**{
        "model": LARGE, "data": DATA, "stages": ["layer2", "layer3"], "micro_batch_size": 4, "steps": 2, **keys,
    })  # fmt: skip


@pytest.mark.parametrize("keys", [
    {"gradient_accumulation": 4, "optimizer": {"name": "adam", "lr": 0.1}},
    {"method": "pipedream", "stages": 3, "precision": "float64"},
    {"method": "local_greedy"},
    pytest.param({"method": "local_overlapping"}, marks=pytest.mark.slow),
])  # fmt: skip
def test_shapes_give_the_same_figures_as_numbers(keys: Any) -> None:
    shapes = build_for_planning(configure_large_model(**keys))
    numbers = build(configure_large_model(**keys))
    assert shapes.example[0].is_meta and not numbers.example[0].is_meta
    assert shapes.footprint == numbers.footprint
    assert build_memory_table(shapes) == build_memory_table(numbers)
    assert format_plan(shapes) == format_plan(numbers)


class ValueReader(nn.Sequential):
    """Model whose constructor reads the values of a weight."""

    def __init__(self) -> None:
        super().__init__(nn.Flatten(), nn.Linear(3072, 200), nn.ReLU(), nn.Linear(200, 10))
        assert float(self[1].weight.detach().abs().max()) > 0


def make_recurrent() -> nn.Module:
    """Return a model whose CPU kernel saves other tensors than shapes show."""
    read = lambda m, x: m.out(m.rnn(x.flatten(1).view(-1, 32, 96))[0][:, -1])  # noqa: E731
    return Composed(read, rnn=nn.LSTM(96, 200, batch_first=True), out=nn.Linear(200, 10))


SMALL = "models.resnet:preact_resnet20"


@pytest.mark.parametrize("entry", [f"{__name__}:ValueReader", f"{__name__}:make_recurrent", SMALL])
def test_a_model_that_reads_values_or_is_small_is_built_with_numbers(entry: str) -> None:
    config = configure_large_model(model={"entry": entry}, stages=1)
    assert not build_for_planning(config).example[0].is_meta


def test_faults_are_those_of_a_run() -> None:
    """A job that is built from shapes reports the faults of a run, also those of labels, which
    have no shapes."""
    for keys in ({"stages": ["layer9"]}, {"model": {**LARGE, "args": {"classes": 5}}}):
        config = configure_large_model(**keys)
        assert list_faults(build_for_planning, config) == list_faults(build, config)


def test_a_language_models_shapes_are_those_of_its_numbers() -> None:
    """Norms, activations, positions and attention have the same costs with shapes as with
    numbers, forward and backward."""
    model = transformer_lm(vocabulary=50, width=32, heads=2, blocks=3, context=16)
    x = torch.zeros(2, 16, dtype=torch.int64)
    numbers = observe_costs(model, x, lambda: model(x))
    with move_to_meta(model):
        shape = to_meta(x)
        shapes = observe_costs(model, shape, lambda: model(shape))
    assert (shapes.live, shapes.runs) == (numbers.live, numbers.runs)
    costs = [
        [(c.name, c.flops, c.backward_flops, sorted(c.saved.values())) for c in observed.calls]
        for observed in (shapes, numbers)
    ]
    assert costs[0] == costs[1]
