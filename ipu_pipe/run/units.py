"""The units of a config's model: what a planner divides."""

from __future__ import annotations

from typing import NamedTuple, Optional, Tuple

import torch
from torch import nn

from ipu_pipe.hardware.costing import Costed, count_units, measure_units
from ipu_pipe.job.entries import resolve_entry
from ipu_pipe.job.schema import Config
from ipu_pipe.model.shapes import made_by_shape
from ipu_pipe.plan.blocks import BlockUnits, count_blocks
from ipu_pipe.run.build import set_up
from ipu_pipe.run.parts import make_data, make_loss, make_model


class ConfigUnits(NamedTuple):
    """The units, the bytes of a sample that enter the first, and what blocks of them cost beside them, where asked for."""

    costed: Costed
    entering: float
    blocks: Optional[BlockUnits] = None


def units_of(config: Config, measured: bool = False, blocks: bool = False) -> ConfigUnits:
    """Those of the model and its loss. Counted by shape, without memory for the weights where the model can be made so;
    `measured`: timed here, with microbatches of the config's size and of twice that. `blocks`: for methods whose blocks have
    losses of their own. Raises BadInput."""
    if measured:
        model, costed, x = _measured(config)
    else:
        model, costed, x = _counted(config)
    entering = x.numel() * x.element_size() / len(x)
    if not blocks:
        return ConfigUnits(costed, entering)
    entry = config.method_args.head
    head = resolve_entry(entry, "method_args.head") if entry else None
    return ConfigUnits(costed, entering, count_blocks(model, x, costed.units, head))


def _counted(config: Config) -> Tuple[nn.Module, Costed, torch.Tensor]:
    loss = make_loss(config)
    x, y = make_data(config).train_batch(0, 0, 2)
    try:
        with made_by_shape():
            model = make_model(config)
        return model, count_units(model, x.to("meta"), (), loss, y.to("meta")), x
    except Exception:  # a model that is made from numbers, or looks at them: told below, if it is not that
        model = make_model(config)
        return model, count_units(model, x, (), loss, y), x


def _measured(config: Config) -> Tuple[nn.Module, Costed, torch.Tensor]:
    setup = set_up(config)
    costed = None
    for size in (config.micro_batch_size, 2 * config.micro_batch_size):
        x, y = setup.to_device(*setup.data.train_batch(0, 0, size))
        costed = costed or count_units(setup.model, x, (), setup.loss, y)
        costed = measure_units(costed, setup.model, setup.loss, x, y)
    assert costed is not None
    return setup.model, costed, x
