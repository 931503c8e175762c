"""Hugging Face's Trainer over a pipeline: `PipelineTrainer(model, args, ..., pipeline={"method": ..., "stages": ...})`.

Trainer keeps its arguments, data, loss, callbacks, evaluation and files. Only the inside of an epoch is replaced: updates are
made by an engine of ipu_pipe, on the emulator or, under torchrun, on processes.

    Trainer     batch 0  batch 1 ... batch r-1 | clip, step           r <= N = gradient_accumulation_steps, < in the last update
    here        microbatches 0 ... N-1 of an update                   microbatches r ... N-1 are scaled by 0

A microbatch's loss is Trainer's own `compute_loss` and thus a share of the update's loss. `LossModel` multiplies it by N
(by N / r where Trainer divides it by r), and the engine averages over N, so that the result is Trainer's sum.
"""

from __future__ import annotations

import contextlib
import copy
import importlib.util
import itertools
import math
from importlib import metadata
from typing import Any, Dict, Iterator, List, Mapping, Optional

import torch
from torch import nn

from ipu_pipe.backends.interface import Engine
from ipu_pipe.backends.ranks import are_joined, is_distributed, is_main, run_on_main
from ipu_pipe.backends.table import launch, make_engine
from ipu_pipe.config.load import configure
from ipu_pipe.config.schema import Config
from ipu_pipe.errors import BadInput, RunFault, raise_faults
from ipu_pipe.job.record import Job
from ipu_pipe.launcher import read_launch
from ipu_pipe.model.batch import count_samples, map_tensors
from ipu_pipe.model.modes import describe_modes, is_evaluating
from ipu_pipe.model.randomness import RandomStates, derive_seed, restore_random_states
from ipu_pipe.model.restoring import restore_modes
from ipu_pipe.pipeline.build import build
from ipu_pipe.text import show
from ipu_pipe.update.optimizer import export_state, import_state


def _describe_torchvision() -> str:
    """Return cause and remedy if an installed torchvision cannot be imported, which transformers then does not say; else ''."""
    if importlib.util.find_spec("torchvision") is None:
        return ""
    try:
        importlib.import_module("torchvision")
    except Exception as error:
        version = metadata.version("torchvision")
        return (
            f"torchvision {version} does not fit torch {torch.__version__} ({error}): pip uninstall torchvision,"
            " or install both from one index by one command"
        )
    return ""


try:
    from accelerate.state import AcceleratorState, PartialState
    from accelerate.utils import DistributedType
    from transformers import Trainer, TrainerCallback
    from transformers.optimization import GreedyLR
    from transformers.trainer_utils import has_length
    from transformers.utils import logging
except (ImportError, RuntimeError) as error:
    reason = _describe_torchvision()
    # transformers' own error is several tracebacks long and does not name torchvision
    cause = None if reason else error
    reason = reason or f"needs pip install 'ipu_pipe[transformers]': {error}"
    raise ImportError(f"ipu_pipe.integrations.transformers: {reason}") from cause

# below transformers' own logger, so that TrainingArguments.log_level applies
logger = logging.get_logger("transformers.PipelineTrainer")
KEYS = (
    "method", "method_args", "stages", "stages_per_device", "recompute", "backend", "precision", "clip", "hardware",
    "allow_nonfinite",
)  # fmt: skip
PASSES = "a pipeline's microbatches are at many places at once"
# TrainingArguments -> (supported value, why other values are refused and what to use instead)
REFUSED: Dict[str, Any] = {
    "fp16": (False, "unsupported: pipeline={'precision': 'bfloat16_mixed'} trains in mixed precision"),
    "bf16": (False, "is a precision of the pipeline: use pipeline={'precision': 'bfloat16_mixed'}"),
    "activation_checkpointing": (False, "is the pipeline's: use pipeline={'recompute': True}"),
    "tf32": (None, "is the pipeline's: use pipeline={'backend': {'tf32': True}}"),
    "torch_compile": (False, "stages are cut from the model's own modules"),
    "auto_find_batch_size": (False, "a run is planned with one batch size"),
    "neftune_noise_alpha": (None, "its noise is of no seeded module, so stages and recomputation would draw others"),
    "torch_empty_cache_steps": (None, PASSES),
    "enable_jit_checkpoint": (False, "checkpoints are written where the pipeline is empty: use save_steps"),
    "ignore_data_skip": (False, "the data of an update depend on its number: leave it out"),
    "full_determinism": (False, "is always so for pipelines (backend.deterministic)"),
    "deepspeed": (None, "divides the model itself"),
    "fsdp": (None, "divides the model itself"),
    "parallelism_config": (None, "divides the model itself"),
    "debug": (None, PASSES),
}


IGNORED_LABEL = -100
LABELS = ("labels", "shift_labels")
# in a config: a loss that ignores another label than -100, or counts each sample (an empty text, the tokens of a router)
COUNTS_ALL = ("ctc_loss_reduction", "semantic_loss_ignore_index", "output_router_logits")


class LossModel(nn.Module):
    """A model and the loss that its Trainer computes, as the one module that a pipeline trains.

    `loss_scale`, `num_items_in_batch`: one number of the microbatch, repeated for each sample  # (B,)
    """

    def __init__(self, trainer: PipelineTrainer, model: nn.Module) -> None:
        super().__init__()
        self.model, self._trainer = model, trainer
        # the user's model is the one whose own mode counts
        self.training = not is_evaluating(model)

    def forward(
        self, inputs: Mapping[str, Any], loss_scale: torch.Tensor, num_items_in_batch: Optional[torch.Tensor] = None
    ) -> torch.Tensor:
        items = None if num_items_in_batch is None else num_items_in_batch[0]
        loss: torch.Tensor = self._trainer.compute_loss(self.model, dict(inputs), num_items_in_batch=items)
        return loss * loss_scale[0]


class UpdateBatches:
    """Trainer's training loader as a data source, read an update at a time.

    The draws of a collator are seeded by (seed, epoch), so that all ranks and resumed runs read the same batches.
    """

    def __init__(self, trainer: PipelineTrainer, loader: Any, updates_per_epoch: int) -> None:
        self._trainer, self._loader, self._per_epoch = trainer, loader, updates_per_epoch
        self._count, self._size = trainer.args.gradient_accumulation_steps, trainer.args.train_batch_size
        self._epoch, self._update = -1, -1
        self._iterator: Iterator[Any] = iter(())
        self._drawn = RandomStates.read()
        self._batches: List[Any] = []

    def train_batches_per_epoch(self, batch_size: int) -> int:
        """Return the number of microbatches of an epoch, including those that are scaled by 0."""
        return self._per_epoch * self._count

    def train_batch(self, epoch: int, index: int, batch_size: int) -> Any:
        """Return microbatch `index` of `epoch` as arguments of `LossModel`."""
        update, within = divmod(index, self._count)
        if (epoch, update) != (self._epoch, self._update):
            with restore_random_states():
                self._read(epoch, update)
        return self._batches[within]

    def test_batches(self, batch_size: int) -> Iterator[Any]:
        """Yield nothing: Trainer evaluates."""
        return iter(())

    def _read(self, epoch: int, update: int) -> None:
        """Read the batches of an update. Start a new pass of the loader unless the update is the next one of this pass."""
        if epoch != self._epoch or update != self._update + 1:
            RandomStates.from_seed(derive_seed(self._trainer.args.seed, "loader", epoch)).write()
            if hasattr(self._loader, "set_epoch"):
                self._loader.set_epoch(epoch)
            # A resumed run reads and skips the finished batches, so that collators make the same draws.
            self._iterator = itertools.islice(self._loader, update * self._count, None)
        else:
            self._drawn.write()
        batches, items = self._trainer.get_batch_samples(self._iterator, self._count, self._trainer.args.device)
        self._drawn, self._epoch, self._update = RandomStates.read(), epoch, update
        if not batches:
            raise RunFault(f"train_dataset: epoch {epoch}: it ended after {update} updates, its length says more")
        self._trainer.current_gradient_accumulation_steps = len(batches)
        is_share = self._trainer.gives_shares(items)
        filled = [self._fill(batch) for batch in batches]
        scales = [float(self._count) if is_share else self._count / len(batches)] * len(batches)
        missing = self._count - len(batches)
        self._batches = [
            self._describe(batch, scale, items) for batch, scale in zip(filled + filled[-1:] * missing, scales + [0.0] * missing)
        ]
        for batch in batches:
            self._trainer.count_inputs(batch)

    def _describe(self, batch: Mapping[str, Any], scale: float, items: Any) -> Dict[str, Any]:
        samples = count_samples(batch)
        inputs: Dict[str, Any] = {"inputs": batch, "loss_scale": torch.full((samples,), scale)}
        if items is not None:
            inputs["num_items_in_batch"] = torch.as_tensor(items).cpu().expand(samples).clone()
        return inputs

    def _fill(self, batch: Mapping[str, Any]) -> Mapping[str, Any]:
        """Fill up the last batch of an epoch with samples whose labels are ignored, where labels can be."""
        missing = self._size - count_samples(batch)
        if missing <= 0 or not self._trainer.can_ignore(batch):
            return dict(batch)
        repeated = map_tensors(lambda t: torch.cat([t, t[-1:].expand(missing, *t.shape[1:])]), batch)
        for name in set(LABELS) & set(repeated):
            repeated[name][-missing:] = IGNORED_LABEL
        return repeated  # type: ignore[no-any-return]


class _Recorded(torch.optim.lr_scheduler.LRScheduler):
    """Repeats the learning rates of another scheduler, by update."""

    def __init__(self, optimizer: torch.optim.Optimizer, rates: List[float]) -> None:
        self._rates = rates
        super().__init__(optimizer)

    def get_lr(self) -> List[Any]:
        return [self._rates[self.last_epoch]]


class PipelineTrainer(Trainer):
    """A `transformers.Trainer` whose `train()` is a pipeline's.

    `pipeline` has keys of a config (`KEYS`, docs/trainer.md). `gradient_accumulation_steps` are the microbatches of an update. In
    one process the emulator trains; under torchrun each process holds its stages, the first one logs, saves and calls the
    callbacks, and all have the whole model after training. Raise `BadInput`, one line for each argument that is not supported.
    """

    # whether this class joined the process group, which all trainers of a process share
    _has_joined = False
    control: Any
    lr_scheduler: Any
    _created_lr_scheduler: bool

    def __init__(self, *args: Any, pipeline: Mapping[str, Any], **kwargs: Any) -> None:
        self._engine: Optional[Engine] = None
        self._job: Optional[Job] = None
        self._is_whole = self._stops = False
        unknown = [key for key in pipeline if key not in KEYS]
        why = f"TrainingArguments say it, or nothing does: must be one of {', '.join(KEYS)}"
        raise_faults([f"pipeline.{key}: {show(pipeline[key])}: {why}" for key in unknown])
        if not hasattr(Trainer, "_run_epoch"):
            raise BadInput("transformers: PipelineTrainer needs version 5: pip install 'ipu_pipe[transformers]'")
        self._settings = dict(pipeline)
        if is_distributed():
            self._leave_data_parallelism()
        super().__init__(*args, **kwargs)
        device = "cuda" if self.args.device.type == "cuda" else "cpu"
        backend = {"name": "distributed" if is_distributed() else "emulator", "device": device}
        self._settings["backend"] = {**backend, **self._settings.get("backend", {})}
        raise_faults(self._list_faults())
        config = self._configure(1, None)
        if config.backend.name == "poptorch":
            raise BadInput("pipeline.backend.name: poptorch: PipelineTrainer has emulator and distributed")
        launch(config, {"output_dir": self.args.output_dir})
        PipelineTrainer._has_joined = is_distributed()

    def _leave_data_parallelism(self) -> None:
        """Let transformers take the ranks for one device: each reads all batches, and the first one writes."""
        # TrainingArguments joins the ranks for one replica per rank
        if are_joined() and not self._has_joined:
            torch.distributed.destroy_process_group()
        AcceleratorState._reset_state()
        launched = read_launch()
        state = {"num_processes": 1, "process_index": launched.rank, "local_process_index": launched.local_rank or 0}
        PartialState._shared_state.update(state, distributed_type=DistributedType.NO, backend=None)

    def _list_faults(self) -> List[str]:
        """List the arguments that a pipeline does not support, a line each."""
        args, faults = self.args, []
        for name, (supported, why) in REFUSED.items():
            value = getattr(args, name, supported)
            if value != supported and value:
                faults.append(f"{name}: {show(value)}: {why}")
        if args.n_gpu > 1:
            faults.append(f"n_gpu: {args.n_gpu}: one process trains on one: use torchrun, or CUDA_VISIBLE_DEVICES=0")
        if self.train_dataset is not None and not has_length(self.train_dataset):
            faults.append("train_dataset: has no length: a pipeline's updates are planned by epochs")
        for name in ("training_step", "_prepare_inputs", "compute_loss_context_manager", "autocast_smart_context_manager"):
            if getattr(type(self), name) is not getattr(Trainer, name):
                faults.append(f"{type(self).__name__}.{name}: no pipeline calls it: override compute_loss")
        for callback in self.callback_handler.callbacks:
            for event in ("on_substep_end", "on_pre_optimizer_step"):
                if getattr(type(callback), event) is not getattr(TrainerCallback, event):
                    faults.append(f"callbacks: {type(callback).__name__}.{event}: is never called: {PASSES}")
        return faults

    # ---- the weights of batches in an update's loss

    def gives_shares(self, items: Any) -> bool:
        """Return whether `compute_loss` gives a microbatch's share of the update's loss, as Trainer's `training_step` asks."""
        if self.loss_is_scaled_for_ga is not None:
            return bool(self.loss_is_scaled_for_ga)
        return (self.model_accepts_loss_kwargs and items is not None) or self.compute_loss_func is not None

    def can_ignore(self, batch: Mapping[str, Any]) -> bool:
        """Return whether the loss leaves out the samples of a batch whose labels are -100."""
        labels, config = batch.get("labels"), getattr(self.model, "config", None)
        if getattr(config, "num_labels", None) == 1 or getattr(config, "problem_type", None) == "regression":
            # integers are values there, even -100
            return False
        if any(getattr(config, name, False) not in (None, False) for name in COUNTS_ALL):
            return False
        # The user's own loss, or a loss of other labels, may count the samples that are to be ignored.
        is_known = self.compute_loss_func is None and type(self).compute_loss is Trainer.compute_loss
        others = {name for name in batch if "label" in name} - set(LABELS)
        return is_known and not others and isinstance(labels, torch.Tensor) and not labels.is_floating_point()

    def count_inputs(self, batch: Mapping[str, Any]) -> None:
        """Count a batch's tokens and operations for Trainer's state."""
        self.current_flos += float(self.floating_point_ops(batch))
        self._track_num_input_tokens(batch)

    # ---- training

    def hyperparameter_search(self, *args: Any, **kwargs: Any) -> Any:
        """Search as Trainer does, in one process only, because several processes would draw different trials."""
        if is_distributed():
            raise BadInput("hyperparameter_search: every process would draw other values: search in one process")
        return super().hyperparameter_search(*args, **kwargs)

    def _configure(self, updates: int, per_epoch: Optional[int]) -> Config:
        """Return the config of the run, with `updates` updates."""
        args, state = self.args, self.state
        intervals = {"steps": (state.eval_steps, state.save_steps), "epoch": (per_epoch, per_epoch)}
        evaluates = intervals.get(args.eval_strategy.value, (None, None))[0]
        saves = intervals.get(args.save_strategy.value, (None, None))[1]
        clip = {"norm": args.max_grad_norm} if args.max_grad_norm > 0 else {}
        clip.update(self._settings.get("clip") or {})
        settings = {
            "micro_batch_size": args.train_batch_size, "gradient_accumulation": args.gradient_accumulation_steps,
            "steps": updates, "seed": args.seed, "loss": "model", "metrics": [], "allow_nonfinite": True,
            "evaluate": {"every": 0, "steps": evaluates}, "checkpoint": {"every": saves},
            "log": {"trace": None, "tensorboard": False}, **self._settings, "clip": clip or None,
        }  # fmt: skip
        if isinstance(settings.get("stages"), list):
            settings["stages"] = [f"model.{name}" for name in settings["stages"]]
        try:
            return configure(**settings)
        except BadInput as error:
            raise BadInput([fault.replace("configure: ", "pipeline.", 1) for fault in error.faults]) from None

    def _inner_training_loop(self, *args: Any, **kwargs: Any) -> Any:
        """Train and remove the pipeline afterwards. Return the first process's result on all processes."""
        self._stops = False
        try:
            output = super()._inner_training_loop(*args, **kwargs)
        except BaseException:
            if self._engine is not None:
                # report the error that ended the run, not one that follows from it
                with contextlib.suppress(Exception):
                    self._engine.abort()
            raise
        finally:
            self._engine = None
            if self._job is not None:
                self._job.precision.give_back()
                self._job = None
            if self.optimizer is not None:
                # the pipeline's own optimizer holds the state
                self.optimizer.state.clear()
        self.state, output = run_on_main(lambda: (self.state, output))
        return output

    def _prepare_for_training(self, max_steps: int, train_dataloader: Any, resume_from_checkpoint: Optional[str]) -> Any:
        """Build the pipeline, and load its checkpoint. Return model and data as Trainer asks."""
        if self._created_lr_scheduler:
            self.lr_scheduler, self._created_lr_scheduler = None, False
        self.create_optimizer()
        self.create_scheduler(num_training_steps=max_steps)
        if isinstance(self.lr_scheduler, (torch.optim.lr_scheduler.ReduceLROnPlateau, GreedyLR)):
            why = "follows what evaluations measure: a pipeline's rates are functions of the update alone"
            raise BadInput(f"lr_scheduler_type: {type(self.lr_scheduler).__name__}: {why}")
        if hasattr(self.optimizer, "train"):
            raise BadInput(f"optim: {type(self.optimizer).__name__}: keeps other weights for evaluation: unsupported")
        count, done = self.args.gradient_accumulation_steps, self.state.global_step
        per_epoch = -(-len(train_dataloader) // count)
        self._names = names = {p: f"model.{name}" for name, p in self.model.named_parameters()}
        # like Trainer, continue with the rates and settings of the checkpoint
        if resume_from_checkpoint is not None:
            self._load_optimizer_and_scheduler(resume_from_checkpoint)
        loaded = export_state(self.optimizer, names)
        self.optimizer.state.clear()
        rates = self._record_rates(done, max_steps)
        with restore_random_states(), self._initial_rates():
            self._model = LossModel(self, self.model)
            self._job = build(
                self._configure(max_steps, per_epoch),
                self._model,
                UpdateBatches(self, train_dataloader, per_epoch),
                optimizer=self.optimizer,
                lr_scheduler=lambda optimizer: _Recorded(optimizer, rates),
                done=done,
            )
        job = self._job
        self._modes = {module: module.training for module in self._model.modules()}
        if is_main():
            # a model from `from_pretrained` comes in evaluation mode, and Trainer says nothing of it
            log = logger.info if job.came_evaluating else logger.warning
            for line in describe_modes(self._model, job.came_evaluating):
                log(line)
        job.may_stop = job.may_stop_drained = True
        if resume_from_checkpoint is not None:
            import_state(job.optimizer, names, *loaded)
        self._engine = make_engine(job, done)
        if not is_main():
            self.callback_handler.callbacks.clear()
        self.callback_handler.model, self.callback_handler.optimizer = self.model, self.optimizer
        self.callback_handler.lr_scheduler, self.callback_handler.train_dataloader = self.lr_scheduler, train_dataloader
        return self.model, train_dataloader

    @contextlib.contextmanager
    def _initial_rates(self) -> Iterator[None]:
        """Give the groups the rates that their scheduler scales: it may have set them to 0, for a warm-up."""
        groups = self.optimizer.param_groups
        now = [group["lr"] for group in groups]
        for group in groups:
            group["lr"] = group.get("initial_lr", group["lr"])
        try:
            yield
        finally:
            for group, rate in zip(groups, now):
                group["lr"] = rate

    def _record_rates(self, done: int, updates: int) -> List[float]:
        """Return the first group's learning rate of each update from `done` on. The scheduler is not changed.

        Earlier updates get the rate of update `done`. Raise `BadInput` if the rates of groups do not stay in proportion.
        """
        groups, state = self.optimizer.param_groups, copy.deepcopy(self.lr_scheduler.state_dict())
        first, rates = [group["lr"] for group in groups], []
        with self._initial_rates():
            base = groups[0]["lr"]
            shares = [group["lr"] / base if base else 1.0 for group in groups]
        # the pipeline steps itself, and torch would warn about an optimizer that does not step
        self.optimizer._opt_called = True
        for k in range(done, updates):
            rates.append(float(groups[0]["lr"]))
            for number, (group, share) in enumerate(zip(groups, shares)):
                if not math.isclose(group["lr"], rates[-1] * share, rel_tol=1e-6, abs_tol=1e-12):
                    why = f"group {number}: update {k} has {group['lr']:g}, in proportion to group 0 it is {rates[-1] * share:g}"
                    raise BadInput(f"lr_scheduler: {type(self.lr_scheduler).__name__}: {why}: a pipeline has one schedule")
            self.lr_scheduler.step()
        self.lr_scheduler.load_state_dict(state)
        for group, rate in zip(groups, first):
            group["lr"] = rate
        return [rates[0] if rates else float(first[0])] * done + rates

    def _run_epoch(
        self, model: nn.Module, epoch: int, train_dataloader: Any, steps_in_epoch: int, num_update_steps_per_epoch: int,
        trial: Any, ignore_keys_for_eval: Any, start_time: float, **resumed: Any,
    ) -> None:  # fmt: skip
        """Make the remaining updates of an epoch."""
        engine, job, count = self._engine, self._job, self.args.gradient_accumulation_steps
        assert engine is not None and job is not None
        rate = None
        for update in range(self.state.global_step - epoch * num_update_steps_per_epoch, num_update_steps_per_epoch):
            k = self.state.global_step
            self.control = self.callback_handler.on_step_begin(self.args, self.state, self.control)
            # evaluations and callbacks leave other modes, which Trainer ends by model.train()
            for module, mode in self._modes.items():
                module.training = mode
            for result in engine.step(k, read=True):
                assert result.loss is not None
                self._add_loss(result.loss)
            self.control = self.callback_handler.on_optimizer_step(self.args, self.state, self.control)
            rate = self._get_learning_rate()
            self.lr_scheduler.step()
            self.state.global_step = k + 1
            self.state.epoch = epoch + min((update + 1) * count, steps_in_epoch) / steps_in_epoch
            self.control = self.callback_handler.on_step_end(self.args, self.state, self.control)
            self._follow_main()
            if self.control.should_epoch_stop:
                raise RunFault(f"update {k}: a callback set should_epoch_stop: a pipeline has begun with the next batches")
            self._stops = self._stops or self.control.should_training_stop
            end = engine.decide_end(k + 1, self._stops)
            self.control.should_training_stop = k + 1 >= end
            self._maybe_log_save_evaluate(
                self._tr_loss, None, model, trial, epoch, ignore_keys_for_eval, start_time, learning_rate=rate
            )
            if self.control.should_training_stop:
                break
        self.control = self.callback_handler.on_epoch_end(self.args, self.state, self.control)
        self._follow_main()
        self._maybe_log_save_evaluate(
            self._tr_loss, None, model, trial, epoch, ignore_keys_for_eval, start_time, learning_rate=rate
        )

    @property
    def _is_drained(self) -> bool:
        """Whether the pipeline is empty after the newest update."""
        done = self.state.global_step
        return self._job is None or not done or self._job.schedule.get_drain_interval(done - 1)[1] == done

    def _follow_main(self) -> None:
        """Copy the control flags of the first process's callbacks if no process is ahead of another."""
        if self._is_drained:
            self.control = run_on_main(lambda: self.control)

    def _add_loss(self, loss: float) -> None:
        """Add an update's loss to the sum that the next line of the log averages."""
        value = torch.tensor(loss, dtype=self._tr_loss.dtype, device=self._tr_loss.device)
        if self.args.logging_nan_inf_filter and not torch.isfinite(value):
            value = self._tr_loss / (1 + self.state.global_step - self._globalstep_last_logged)
        self._tr_loss += value

    def _finalize_training(self, *args: Any, **kwargs: Any) -> Any:
        assert self._engine is not None
        self._engine.close()
        self._engine = None
        return super()._finalize_training(*args, **kwargs)

    # ---- the whole model, in an epoch and between

    @contextlib.contextmanager
    def _hold_whole_model(self) -> Iterator[None]:
        """Hold the whole model with its newest weights in every process."""
        if self._engine is None or self._is_whole:
            yield
            return
        if not self._is_drained:
            raise RunFault(
                f"update {self.state.global_step - 1}: a callback wants an evaluation or a checkpoint where the pipeline of"
                f" {self._settings.get('method')} is not empty: it is after each eval_steps and save_steps"
            )
        with self._engine.hold_whole_model():
            self._is_whole = True
            try:
                yield
            finally:
                self._is_whole = False

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
        """Evaluate or predict as Trainer does, on the whole model."""
        training = [] if self._engine is None else [self._model]
        with self._hold_whole_model(), restore_modes(*training):
            return super().evaluation_loop(*args, **kwargs)

    def save_model(self, *args: Any, **kwargs: Any) -> None:
        """Save the model, or its adapters, as Trainer does."""
        with self._hold_whole_model():
            super().save_model(*args, **kwargs)

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        """Write a checkpoint that Trainer, too, can resume from."""
        assert self._engine is not None
        with self._hold_whole_model():
            state = self._engine.collect_state()
            if is_main() and state is not None:
                import_state(self.optimizer, self._names, state.optimizer, state.plain)
                super()._save_checkpoint(model, trial)
                self.optimizer.state.clear()
        self.state.best_model_checkpoint = run_on_main(lambda: self.state.best_model_checkpoint)
