"""The loop of a config, as `ipu_pipe.compare` runs it: what anyone would write over `Pipeline`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Iterator, Mapping, Sequence

import torch

from ipu_pipe.config.compare import choose_method_settings, dump_config
from ipu_pipe.config.schema import Config
from ipu_pipe.errors import BadInput, raise_faults
from ipu_pipe.job.evaluation import load_test_batches
from ipu_pipe.job.factories import make_factory, make_scheduler
from ipu_pipe.job.record import RunSetup
from ipu_pipe.model.loss import OwnLoss
from ipu_pipe.model.stages import partition
from ipu_pipe.run.setup import set_up
from ipu_pipe.update.optimizer import make_groups
from ipu_pipe.update.rates import advise_rate, compute_rate

# arguments of Pipeline that have the same name and form in a config
SAME = ("precision", "recompute", "replicas", "allow_nonfinite")


@dataclass(frozen=True)
class ConfigLoop:
    """A config's loop: call it with (pipeline, seed). Raise `BadInput` for keys that it cannot
    have.

    Batches, rates and evaluations are those of `ipu_pipe.train`.
    """

    config: Config

    def __post_init__(self) -> None:
        config = self.config
        # a loop over `Pipeline` has none of these, and would leave them out in silence
        is_set = {
            "callbacks": config.callbacks,
            "early_stopping": config.early_stopping,
            "optimizer.groups": config.optimizer.groups,
            "optimizer.by_stage": config.optimizer.by_stage,
            "lr_schedule.name: plateau": config.lr_schedule.name == "plateau",
            "method_args.warmup": config.method_args.warmup,
        }
        remedy = "leave it out, or write a loop for ipu_pipe.compare"
        raise_faults(
            [f"{key}: unsupported by compare: {remedy}" for key, value in is_set.items() if value]
        )

    @property
    def source(self) -> str:
        """Return the text by which a changed loop is noticed."""
        return dump_config(self.config)

    def describe_methods(self, names: Sequence[str]) -> dict[str, Mapping[str, Any]]:
        """Return methods as `compare` takes them: the config's own has its `method_args`."""
        return {name: choose_method_settings(self.config, name) for name in names}

    def __call__(self, pipeline: Any, seed: int) -> None:
        """Train once."""
        config = self.config.model_copy(update={"seed": seed})
        # the pipeline converts the model to the config's precision
        setup = set_up(config.model_copy(update={"precision": "float32"}))
        optimizer = _make_optimizer(config, setup)
        with pipeline(
            setup.model,
            # None: the model's output is its loss
            None if isinstance(setup.loss, OwnLoss) else setup.loss,
            optimizer,
            microbatches=config.gradient_accumulation,
            loss_weight=setup.loss_weight,
            clip=None if config.clip is None else (config.clip.norm, config.clip.scope),
            ema=None if config.ema is None else config.ema.decay,
            **{key: getattr(config, key) for key in SAME},
        ) as pipe:
            # of the pipeline's method, whose replicas may take more data than the config says
            per_epoch, updates = pipe.count_updates(setup)
            every = config.evaluate.interval(per_epoch)
            scheduler = _make_scheduler(config, optimizer, per_epoch, updates)
            # updates between two steps of the scheduler
            interval = per_epoch if config.lr_schedule.interval == "epoch" else 1
            if interval is None:
                why = "the data have no epochs: must be update"
                raise BadInput(f"lr_schedule.interval: epoch: {why}")
            for k in range(updates):
                pipe.step(microbatches=_read_batch(setup, k, pipe.microbatches, per_epoch))
                if (k + 1) % interval == 0:
                    scheduler.step()
                if k + 1 == updates or (every and (k + 1) % every == 0):
                    pipe.evaluate(load_test_batches(setup), config.metrics)


def _make_optimizer(config: Config, setup: RunSetup) -> torch.optim.Optimizer:
    """Return the config's optimizer over the model, with and without weight decay."""
    x, _ = setup.prepare_batch(setup.data.train_batch(0, 0, setup.config.micro_batch_size))
    # one stage, so that the groups differ by decay alone; the pipeline divides them by its own
    groups = make_groups(setup.model, partition(setup.model, x, 1), config.optimizer.no_decay)
    for group in groups:
        # the pipeline's own names, which are not settings
        del group["stage"], group["member"]
    if config.optimizer.leaves_rate_open:
        # the rate of a method without delay, of which each method gets multiples
        optimizer = config.optimizer.fill_rates([advise_rate(0.0)])
        config = config.model_copy(update={"optimizer": optimizer})
    return make_factory(config)(groups)


def _make_scheduler(config: Config, optimizer: Any, per_epoch: int | None, updates: int) -> Any:
    """Return a scheduler of torch that gives the config's rates."""
    settings = config.lr_schedule
    if settings.is_played:
        return make_scheduler(config)(optimizer)
    total = (settings.total_steps or updates) if settings.falls else updates

    def find_share(k: int) -> float:
        # a scheduler asks once more, after the last update
        return compute_rate(settings, 1.0, min(k, total - 1), total, per_epoch)

    return torch.optim.lr_scheduler.LambdaLR(optimizer, find_share)


def _read_batch(
    setup: RunSetup, k: int, count: int, per_epoch: int | None
) -> Iterator[tuple[Any, Any]]:
    """Yield the `count` microbatches of update k."""
    size = setup.config.micro_batch_size
    epoch, update = (0, k) if per_epoch is None else divmod(k, per_epoch)
    first = update * count
    # replicas take turns in the data, and a step takes the batch of one after that of another
    replicas = setup.config.replicas
    for index in sorted(range(first, first + count), key=lambda index: index % replicas):
        yield setup.prepare_batch(setup.data.train_batch(epoch, index, size))
