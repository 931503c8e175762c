"""The emulator on a CUDA device: the same laws as on the CPU. Runs only where there is one."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from ipu_pipe.methods import METHODS, resolve_method
from tests.staged_models import MODELS, batches, whole
from tests.test_emulator_exact import OPTIMIZERS, assert_equal, emulate, fresh, literal
from tests.test_rules import ROWS

# spectrain is a row of the rules, blocks with losses of their own are those of test_local
WHOLE = [name for name, m in METHODS.items() if name != "spectrain" and m.structure is None]
pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def deterministic() -> Any:
    torch.backends.cudnn.deterministic = True
    yield
    torch.backends.cudnn.deterministic = False


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("model", list(MODELS))
@pytest.mark.parametrize("method", WHOLE)
def test_weights_equal_those_of_the_literal_replay(method: str, model: str, dtype: torch.dtype) -> None:
    data = [(x.cuda(), y.cuda()) for x, y in batches(5 * 8, dtype=dtype)]
    stages = [stage.cuda() for stage in fresh(model, dtype)]
    twin, unsplit = copy.deepcopy(stages), whole(stages)
    emulate(unsplit, resolve_method(method), 5, data, OPTIMIZERS["sgd"])
    literal(twin, resolve_method(method), 5, data, OPTIMIZERS["sgd"])
    assert_equal(unsplit, twin)


@pytest.mark.parametrize("name", list(ROWS))
def test_rules_equal_those_of_the_literal_replay(name: str) -> None:
    row = ROWS[name]
    method = resolve_method(row.method, row.args)
    data = [(x.cuda(), y.cuda()) for x, y in batches(5 * 8)]
    stages = [stage.cuda() for stage in fresh("residual")]
    twin, unsplit = copy.deepcopy(stages), whole(stages)
    emulate(unsplit, method, 5, data, row.optimizers[0], args=row.args, switch=row.switch)
    literal(twin, method, 5, data, row.optimizers[0], args=row.args, switch=row.switch)
    expected = whole(twin).state_dict()
    for key, value in unsplit.state_dict().items():
        assert torch.allclose(value, expected[key], rtol=1e-8, atol=1e-10), key
