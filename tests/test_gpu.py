"""The emulator on a CUDA device: the same laws as on the CPU. Runs only where there is one."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from ipu_pipe.methods import METHODS, resolve_method
from tests.staged_models import MODELS, batches, whole
from tests.test_emulator_exact import OPTIMIZERS, assert_equal, emulate, fresh, literal

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def deterministic() -> Any:
    torch.backends.cudnn.deterministic = True
    yield
    torch.backends.cudnn.deterministic = False


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("model", list(MODELS))
@pytest.mark.parametrize("method", list(METHODS))
def test_weights_equal_those_of_the_literal_replay(method: str, model: str, dtype: torch.dtype) -> None:
    data = [(x.cuda(), y.cuda()) for x, y in batches(5 * 8, dtype=dtype)]
    stages = [stage.cuda() for stage in fresh(model, dtype)]
    twin, unsplit = copy.deepcopy(stages), whole(stages)
    emulate(unsplit, resolve_method(method), 5, data, OPTIMIZERS["sgd"])
    literal(twin, resolve_method(method), 5, data, OPTIMIZERS["sgd"])
    assert_equal(unsplit, twin)
