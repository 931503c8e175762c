"""Make what a config's run gives its pipeline: model, loss, data, initial weights and optimizer."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch import nn

from ipu_pipe.config.schema import Config
from ipu_pipe.config.sections import GIVEN
from ipu_pipe.data import DataSource
from ipu_pipe.data.loaders import LoaderData
from ipu_pipe.errors import BadInput, raise_faults
from ipu_pipe.files import parse_path
from ipu_pipe.job.evaluation import try_metrics
from ipu_pipe.job.factories import (
    Placed,
    apply_settings_by_stage,
    count_config_moments,
    explain_wrong_call,
    make_data,
    make_factory,
    make_loss,
    make_loss_weight,
    make_model,
)
from ipu_pipe.job.metrics import Metric, make_metrics
from ipu_pipe.job.overrides import Overrides
from ipu_pipe.job.record import InitialWeights, RunSetup, Setup, get_fields
from ipu_pipe.model.loss import Loss
from ipu_pipe.model.meta import build_on_meta
from ipu_pipe.pipeline.build import Client, make_setup, set_process_state
from ipu_pipe.pipeline.checks import require_device
from ipu_pipe.schedule.versions import VersionTable
from ipu_pipe.store.checkpoint import find_newest, load_weights, read_weights
from ipu_pipe.text import describe_kind
from ipu_pipe.update.optimizer import (
    Groups,
    Member,
    OptimizerFactory,
    make_factory_of,
    make_groups,
)
from ipu_pipe.update.rates import advise_rate


def set_up(
    config: Config,
    model: nn.Module | None = None,
    data: DataSource | None = None,
    loss: Loss | str | None = None,
    *,
    done: int = 0,
    by_shape: bool = False,
    **others: Any,
) -> RunSetup:
    """Make the model, loss, data and metrics that `config` describes, ready to run.

    `model`, `data`, `loss` and `others` (fields of `Overrides`) replace the config's entries.
    `done`: the updates of the checkpoint from which the run resumes. `by_shape`: model and
    microbatches are on the meta device (see `ipu_pipe.run.planning`).
    """
    client = ConfigClient(config, Overrides(model, data, loss, **others), done, by_shape)
    return client.complete(client.set_up())


class ConfigClient(Client):
    """The run of a config, for which its pipeline is built. The arguments are as in `set_up`.

    `changes`: the keys that the config leaves open, once they are known. `advice`: a line about the
    learning rate that the method advised; empty if the config has its own.
    """

    def __init__(
        self, config: Config, objects: Overrides, done: int = 0, by_shape: bool = False
    ) -> None:
        self._config = config
        self._objects = objects
        self._by_shape = by_shape
        self._metrics: tuple[Metric, ...] = ()
        self._initial_weights: InitialWeights | None = None
        self.is_given = objects.model is not None
        self.replaces_weights = done > 0
        self.changes: dict[str, Any] = {}
        self.advice = ""

    def set_up(self) -> Setup:
        """Return model, loss and data, checked and on their device."""
        objects = self._objects
        objects.require_entries(self._config)
        where = self._config.backend.device
        require_device(where)
        device = torch.device("meta" if self._by_shape else where)
        # before the model is made, whose initial weights are drawn from these generators
        set_process_state(self._config, device)
        model = objects.model
        if model is None:
            with build_on_meta() if self._by_shape else contextlib.nullcontext():
                model = make_model(self._config)
        data = make_data(self._config) if objects.data is None else objects.data
        _require_callable_source(data)
        size = choose_batch_size(self._config, data)
        config = self._config = self._config.model_copy(update={"micro_batch_size": size})
        loss = make_loss(config, objects)
        self._metrics = make_metrics(config.metrics if objects.metrics is None else objects.metrics)
        weight = objects.loss_weight if callable(objects.loss_weight) else config.loss_weight
        return make_setup(config, model, data, loss, make_loss_weight(weight, loss), device, self)

    def complete(self, setup: Setup) -> RunSetup:
        """Return the setup with what a run has besides, and with the changes of its config."""
        fields = get_fields(setup, Setup)
        fields["config"] = setup.config.model_copy(update=self.changes)
        return RunSetup(**fields, metrics=self._metrics, initial_weights=self._initial_weights)

    def load_weights(self, model: nn.Module) -> None:
        """Load those of `init_from`."""
        if self._config.init_from:
            self._initial_weights = _load_initial_weights(model, self._config)

    def try_out(self, setup: Setup) -> None:
        """Run the metrics on a batch of the test set before anything is written."""
        try_metrics(self.complete(setup))

    def count_moments(self) -> int:
        """Return those of the config's optimizer."""
        return count_config_moments(self._config)

    def load_heads(self, model: nn.Module) -> None:
        """Load `init_from` again, now that the model has heads, which may be among the weights."""
        if self._config.init_from:
            _load_initial_weights(model, self._config, heads_too=False)

    def group(
        self, setup: Setup, placed: Placed, table: VersionTable
    ) -> tuple[Groups, OptimizerFactory]:
        """Return the groups of the config's optimizer, or of the one from Python, with what differs
        by stage, and the optimizer as a function of groups.
        """
        replacement = self._objects.optimizer
        self._fill_open_rates(table)
        config = self._config.model_copy(update=self.changes)
        members = [Member(one.match, one.ndim) for one in config.optimizer.groups] or [Member()]
        groups = make_groups(setup.model, placed.partition, config.optimizer.no_decay, members)
        apply_settings_by_stage(config, groups, table.rule_lag().tolist())
        return groups, make_factory(config) if replacement is None else make_factory_of(replacement)

    def _fill_open_rates(self, table: VersionTable) -> None:
        """Set the learning rates that the config leaves to the method.

        The delays of methods that update single stages count all stages' updates, of which a stage
        makes one in P.
        """
        optimizer = self._config.optimizer
        # an optimizer from Python has a rate of its own
        if not optimizer.leaves_rate_open or optimizer.name == GIVEN:
            return
        lags = table.rule_lag() / (len(table.rule_lag()) if table.method.history is not None else 1)
        # its config has the same rate under each method
        is_given = self._objects.optimizer is not None
        delay = 0.0 if is_given else float(lags.max())
        rate = advise_rate(delay)
        self.changes["optimizer"] = optimizer.fill_rates([rate] * len(optimizer.members))
        if not is_given:
            self.advice = (
                f"optimizer.lr: {rate:g}, advised for {table.method.name} (greatest delay "
                f"{delay:g} updates); --set optimizer.lr=X sets another"
            )


def _require_callable_source(data: DataSource) -> None:
    """Raise `BadInput` if a method of the data source, or its validation set, cannot be called as a
    run calls it.
    """
    arguments = {
        "train_batch": ("epoch", "index", "batch_size"),
        "test_batches": ("batch_size",),
        "train_batches_per_epoch": ("batch_size",),
    }
    reasons = {
        name: explain_wrong_call(getattr(data, name), *names) for name, names in arguments.items()
    }
    raise_faults(
        [f"data: {type(data).__name__}.{name}: {why}" for name, why in reasons.items() if why]
    )
    validation = getattr(data, "validation", None)
    if validation is not None and not callable(getattr(validation, "test_batches", None)):
        why = "must be a DataSource, whose test set is the validation set"
        raise BadInput(f"data: validation: {describe_kind(validation)}: {why}")


def choose_batch_size(config: Config, data: DataSource) -> int:
    """Return the samples of a microbatch: the config's, or those of a loader's batches if the
    config does not set them.
    """
    # a number that was set counts, also if it is the default
    if "micro_batch_size" in config.model_fields_set or not isinstance(data, LoaderData):
        return config.micro_batch_size
    return data.read_batch_size() or config.micro_batch_size


def _load_initial_weights(
    model: nn.Module, config: Config, heads_too: bool = True
) -> InitialWeights | None:
    """Load the weights of `init_from` into the model. Raise `BadInput` if they do not fit.

    Return which of them were loaded if not all need to fit (`strict: false`), else None.
    """
    init_from = config.init_from
    assert init_from is not None
    state = model.state_dict()
    tensors = None
    try:
        path = find_newest(parse_path(init_from.path, "path"))
        tensors = read_weights(path)
        left_out, new = load_weights(model, tensors, str(path), heads_too, init_from.strict)
    except BadInput as error:
        faults = [f"init_from: {fault}" for fault in error.faults]
        if tensors is not None:
            fits = any(
                name in state and state[name].shape == value.shape
                for name, value in tensors.items()
            )
            # one remedy for all of them, after the last
            faults[-1] += (
                "; init_from: {path: ..., strict: false} takes what fits"
                if fits
                else "; nothing in it fits"
            )
        raise BadInput(faults) from None
    return (
        None
        # all names fit, or the load has raised
        if init_from.strict
        else InitialWeights(str(path), len(state) - len(new), left_out, new)
    )
