"""The units of a config's model: what a planner divides."""

from __future__ import annotations

from typing import Tuple

import torch

from ipu_pipe.hardware.costing import Costed, count_units, measure_units
from ipu_pipe.job.schema import Config
from ipu_pipe.run.build import set_up
from ipu_pipe.run.parts import make_data, make_model


def units_of(config: Config, measured: bool = False) -> Tuple[Costed, float]:
    """The units, and the bytes of a sample that enter the first. Counted by shape, without memory for the weights where the model
    can be made so; `measured`: timed here, with microbatches of the config's size and of twice that."""
    if measured:
        return _measured(config)
    x, _ = make_data(config).train_batch(0, 0, 2)
    entering = x.numel() * x.element_size() / len(x)
    try:
        with torch.device("meta"):
            model = make_model(config)
        return count_units(model, x.to("meta")), entering
    except Exception:  # a model that is made from numbers, or looks at them: told below, if it is not that
        return count_units(make_model(config), x), entering


def _measured(config: Config) -> Tuple[Costed, float]:
    setup = set_up(config)
    costed = None
    for size in (config.micro_batch_size, 2 * config.micro_batch_size):
        x, y = setup.to_device(*setup.data.train_batch(0, 0, size))
        costed = measure_units(costed or count_units(setup.model, x), setup.model, setup.loss, x, y)
    assert costed is not None
    return costed, x.numel() * x.element_size() / len(x)
