"""Hugging Face's Trainer over a pipeline:
`PipelineTrainer(model, args, ..., pipeline={"method": ..., "stages": ...})`.

Trainer's own loop runs. `training_step` gathers the microbatches of an update and gives them to an
`ipu_pipe.Pipeline`, which steps the optimizer; Trainer steps a view of it, which changes nothing,
and its scheduler.

    Trainer     batch 0  batch 1 ... batch r-1 | clip, step           r <= N = gradient_accumulation_steps, < in the last update
    here        microbatches 0 ... N-1 of an update                   microbatches r ... N-1 count 0

A microbatch's loss is Trainer's own `compute_loss` and thus a share of the update's loss.
`LossModel` multiplies it by N (by N / r where Trainer divides it by r), and the pipeline averages
over N, so that the result is Trainer's sum.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
from importlib import metadata
from typing import Any, Iterator, Mapping, Sequence

import torch
from torch import nn

from ipu_pipe.backends.ranks import are_joined, is_distributed, is_main, run_on_main
from ipu_pipe.backends.table import launch
from ipu_pipe.config.load import configure
from ipu_pipe.config.schema import Config
from ipu_pipe.errors import BadInput, raise_faults
from ipu_pipe.model.batch import count_samples, map_tensors
from ipu_pipe.model.modes import enter_training
from ipu_pipe.model.randomness import RandomStates, derive_seed, restore_random_states
from ipu_pipe.pipeline.pipeline import Pipeline, Update
from ipu_pipe.pipeline.state import FIRST_FORMAT
from ipu_pipe.schedule.methods import resolve_method
from ipu_pipe.text import show
from ipu_pipe.update.optimizer import export_state, import_state


def _describe_torchvision() -> str:
    """Return cause and remedy if an installed torchvision cannot be imported, which transformers
    then does not say; else ''.
    """
    if importlib.util.find_spec("torchvision") is None:
        return ""
    try:
        importlib.import_module("torchvision")
    except Exception as error:
        version = metadata.version("torchvision")
        return (
            f"torchvision {version} does not fit torch {torch.__version__} ({error}): pip "
            f"uninstall torchvision,"
            " or install both from one index by one command"
        )
    return ""


try:
    from accelerate.state import PartialState
    from accelerate.utils import DistributedType
    from transformers import Trainer, TrainerCallback
    from transformers.trainer_callback import CallbackHandler
    from transformers.trainer_utils import has_length
except (ImportError, RuntimeError) as error:
    reason = _describe_torchvision()
    # transformers' own error is several tracebacks long and does not name torchvision
    cause = None if reason else error
    reason = reason or f"needs pip install transformers accelerate: {error}"
    raise ImportError(f"ipu_pipe.integrations.transformers: {reason}") from cause

KEYS = (
    "method",
    "method_args",
    "stages",
    "stages_per_device",
    "recompute",
    "backend",
    "precision",
    "clip",
    "hardware",
    "allow_nonfinite",
)
PASSES = "a pipeline's microbatches are at many places at once"
# TrainingArguments -> (supported value, why other values are refused and what to use instead)
REFUSED: dict[str, Any] = {
    "fp16": (
        False,
        "unsupported: pipeline={'precision': 'bfloat16_mixed'} trains in mixed precision",
    ),
    "bf16": (False, "is a precision of the pipeline: use pipeline={'precision': 'bfloat16_mixed'}"),
    "activation_checkpointing": (False, "is the pipeline's: use pipeline={'recompute': True}"),
    "tf32": (None, "is the pipeline's: use pipeline={'backend': {'tf32': True}}"),
    "torch_compile": (False, "stages are cut from the model's own modules"),
    "auto_find_batch_size": (False, "a run is planned with one batch size"),
    "neftune_noise_alpha": (
        None,
        "its noise is not drawn by a seeded module, so stages and recomputation would draw other "
        "values",
    ),
    "torch_empty_cache_steps": (None, PASSES),
    "enable_jit_checkpoint": (
        False,
        "checkpoints are written where the pipeline is empty: use save_steps",
    ),
    "ignore_data_skip": (False, "the data of an update depend on its number: leave it out"),
    "full_determinism": (False, "is always so for pipelines (backend.deterministic)"),
    "deepspeed": (None, "divides the model itself"),
    "fsdp": (None, "divides the model itself"),
    "parallelism_config": (None, "divides the model itself"),
    "debug": (None, PASSES),
    "save_on_each_node": (
        False,
        "the first process alone writes: output_dir must be a folder that all processes share",
    ),
}


IGNORED_LABEL = -100
LABELS = ("labels", "shift_labels")
# in a config: a loss that ignores another label than -100, or counts each sample (an empty text,
# the tokens of a router)
COUNTS_ALL = ("ctc_loss_reduction", "semantic_loss_ignore_index", "output_router_logits")


class LossModel(nn.Module):
    """A model and the loss that its Trainer computes, as the one module that a pipeline trains.

    For each sample: `loss_share`: N, or 0 for a microbatch that counts 0, and the number by which Trainer divides  # (B, 2)
    `num_items_in_batch`: the labels of the update  # (B,)
    """

    def __init__(self, trainer: PipelineTrainer, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self._trainer = trainer

    def forward(
        self,
        inputs: Mapping[str, Any],
        loss_share: torch.Tensor,
        num_items_in_batch: torch.Tensor | None = None,
    ) -> torch.Tensor:
        items = None if num_items_in_batch is None else num_items_in_batch[0]
        loss: torch.Tensor = self._trainer.compute_loss(
            self.model, dict(inputs), num_items_in_batch=items
        )
        # in float64, so that the gradient of Trainer's loss is rounded to Trainer's own for every N
        return loss.double() * loss_share[0, 0] / loss_share[0, 1]

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Do nothing, because Trainer calls this while gradients of microbatches in flight add up;
        the pipeline clears them.
        """


class SeededBatches(torch.utils.data.IterableDataset):  # type: ignore[type-arg]
    """Trainer's training loader, whose draws (of a collator, of a sampler) are seeded by (seed,
    epoch).

    So all ranks and resumed runs read the same batches.
    """

    def __init__(self, loader: Any, seed: int) -> None:
        self._loader = loader
        self._seed = seed
        self.epoch = 0

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> Iterator[Any]:
        # states of their own: what the model draws in between does not shift the batches
        drawn = RandomStates.from_seed(derive_seed(self._seed, "loader", self.epoch))
        if hasattr(self._loader, "set_epoch"):
            self._loader.set_epoch(self.epoch)
        iterator: Iterator[Any] | None = None
        # no batch can be this object, even if batches are None
        end = object()
        while True:
            with restore_random_states():
                drawn.write()
                # making it may draw too
                iterator = iter(self._loader) if iterator is None else iterator
                batch = next(iterator, end)
                drawn = RandomStates.read()
            if batch is end:
                return
            yield batch


# events after which Trainer reads no flag of the control, or that the first process alone sees
UNREAD = (
    "on_substep_end",
    "on_pre_optimizer_step",
    "on_optimizer_step",
    "on_prediction_step",
    "on_push_begin",
)
APART = (
    "evaluate, predict and save_model need all processes, but callbacks run on the first: set "
    "control.should_evaluate or control.should_save, or call them in on_evaluate or on_save"
)


class SharedCallbacks(CallbackHandler):  # type: ignore[misc]
    """Callbacks of the first process, whose control flags and errors all processes share in
    training.
    """

    is_training = False
    # the event whose callbacks run now; the other processes wait for its end
    event = ""

    @property
    def is_collective(self) -> bool:
        """Whether all processes run this code together: in training, outside of callbacks."""
        return self.is_training and not self.event

    def call_event(self, event: str, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        """Call the event in the first process. Return its control, or raise its error, in all
        processes.
        """
        call = functools.partial(self._call_here, event, args, state, control, **kwargs)
        if self.is_collective and event not in UNREAD:
            return run_on_main(call)
        # such as a callback's own `trainer.log()`, which the others do not call
        return call() if is_main() else control

    def _call_here(self, event: str, *args: Any, **kwargs: Any) -> Any:
        outer_event = self.event
        self.event = event
        try:
            return super().call_event(event, *args, **kwargs)
        finally:
            self.event = outer_event


class PipelineTrainer(Trainer):
    """A `transformers.Trainer` whose `train()` is a pipeline's.

    `pipeline` has keys of a config (`KEYS`, docs/trainer.md). `gradient_accumulation_steps` are the
    microbatches of an update. In one process the emulator trains; under torchrun each process holds
    its stages, the first one logs, saves and calls the callbacks, and all have the whole model
    after training. Raise `BadInput`, one line for each argument that is not supported.
    """

    # whether this class joined the process group, which all trainers of a process share
    _has_joined = False
    callback_handler: Any
    control: Any
    optimizer: Any
    state: Any

    def __init__(self, *args: Any, pipeline: Mapping[str, Any], **kwargs: Any) -> None:
        self._pipe: Pipeline | None = None
        # whether this training has made a step, before which each process has the whole model
        self._has_stepped = False
        self._is_whole = False
        # holds the whole model from an evaluation until the callbacks of a checkpoint have run
        self._until_saved = contextlib.ExitStack()
        # the batches of the update that Trainer's loop has begun
        self._gathered: list[Mapping[str, Any]] = []
        # updates whose losses the next line of the log averages
        self._reported = 0
        unknown = [key for key in pipeline if key not in KEYS]
        why = f"is set by TrainingArguments or unsupported: must be one of {', '.join(KEYS)}"
        raise_faults([f"pipeline.{key}: {show(pipeline[key])}: {why}" for key in unknown])
        if not hasattr(Trainer, "_run_epoch"):
            raise BadInput(
                "transformers: PipelineTrainer needs version 5: pip install -U transformers"
            )
        super().__init__(*args, **kwargs)
        handler = self.callback_handler
        self.callback_handler = SharedCallbacks(
            handler.callbacks,
            handler.model,
            handler.processing_class,
            handler.optimizer,
            handler.lr_scheduler,
        )
        name = "distributed" if is_distributed() else "emulator"
        backend = {"name": name, "device": self.args.device.type}
        self._settings = {**pipeline, "backend": {**backend, **pipeline.get("backend", {})}}
        raise_faults(self._list_faults())
        self._config = self._configure()
        if self._config.backend.facts.trains_on is not None:
            name = self._config.backend.name
            raise BadInput(
                f"pipeline.backend.name: {name}: PipelineTrainer has emulator, distributed and xla"
            )
        launch(self._config, {"output_dir": self.args.output_dir})
        PipelineTrainer._has_joined = is_distributed()

    def create_accelerator_and_postprocess(self) -> None:
        """Make the accelerator as Trainer does; on processes, for one device: ranks are stages, not
        replicas.

        Each rank reads all batches, and the first one writes.
        """
        if is_distributed():
            # TrainingArguments joins the ranks for one replica per rank
            if are_joined() and not self._has_joined:
                torch.distributed.destroy_process_group()
            state = PartialState()
            state.num_processes = 1
            state.distributed_type = DistributedType.NO
        super().create_accelerator_and_postprocess()

    def _list_faults(self) -> list[str]:
        """List the arguments that a pipeline does not support, a line each."""
        args = self.args
        faults = []
        for name, (supported, why) in REFUSED.items():
            value = getattr(args, name, supported)
            if value != supported and value:
                faults.append(f"{name}: {show(value)}: {why}")
        if args.n_gpu > 1:
            faults.append(
                f"n_gpu: {args.n_gpu}: one process trains on one: use torchrun, or "
                f"CUDA_VISIBLE_DEVICES=0"
            )
        if self.train_dataset is not None and not has_length(self.train_dataset):
            faults.append(
                "train_dataset: has no length: the batches of a pipeline are seeded and counted by "
                "epochs"
            )
        for name in (
            "training_step",
            "_prepare_inputs",
            "compute_loss_context_manager",
            "autocast_smart_context_manager",
        ):
            if getattr(type(self), name) is not getattr(PipelineTrainer, name):
                faults.append(
                    f"{type(self).__name__}.{name}: no pipeline calls it: override compute_loss"
                )
        for callback in self.callback_handler.callbacks:
            for event in ("on_substep_end", "on_pre_optimizer_step"):
                if getattr(type(callback), event) is not getattr(TrainerCallback, event):
                    faults.append(
                        f"callbacks: {type(callback).__name__}.{event}: sees no gradients: {PASSES}"
                    )
        return faults

    def _configure(self) -> Config:
        """Return the config of the settings in `pipeline`, which names their faults."""
        settings = {**self._settings, "clip": self._read_clip(), "seed": self.args.seed}
        try:
            return configure(
                gradient_accumulation=self.args.gradient_accumulation_steps, **settings
            )
        except BadInput as error:
            raise BadInput(
                [fault.replace("configure: ", "pipeline.", 1) for fault in error.faults]
            ) from None

    def _read_clip(self) -> dict[str, Any] | None:
        """Return the section `clip` of a config, whose norm is `max_grad_norm` unless `pipeline`
        has one.
        """
        clip = {"norm": self.args.max_grad_norm} if self.args.max_grad_norm > 0 else {}
        return {**clip, **(self._settings.get("clip") or {})} or None

    # ---- the weights of batches in an update's loss

    def gives_shares(self, items: Any) -> bool:
        """Return whether `compute_loss` gives a microbatch's share of the update's loss, as
        Trainer's `training_step` asks.
        """
        if self.loss_is_scaled_for_ga is not None:
            return bool(self.loss_is_scaled_for_ga)
        return (
            self.model_accepts_loss_kwargs and items is not None
        ) or self.compute_loss_func is not None

    def can_ignore(self, batch: Mapping[str, Any]) -> bool:
        """Return whether the loss leaves out the samples of a batch whose labels are -100."""
        labels = batch.get("labels")
        config = getattr(self.model, "config", None)
        if (
            getattr(config, "num_labels", None) == 1
            or getattr(config, "problem_type", None) == "regression"
        ):
            # integers are values there, even -100
            return False
        if any(getattr(config, name, False) not in (None, False) for name in COUNTS_ALL):
            return False
        # The user's own loss, or a loss of other labels, may count the samples that are to be
        # ignored.
        is_known = (
            self.compute_loss_func is None and type(self).compute_loss is Trainer.compute_loss
        )
        others = {name for name in batch if "label" in name} - set(LABELS)
        return (
            is_known
            and not others
            and isinstance(labels, torch.Tensor)
            and not labels.is_floating_point()
        )

    def _make_microbatches(
        self, batches: Sequence[Mapping[str, Any]], items: Any
    ) -> list[dict[str, Any]]:
        """Return the N microbatches of an update as arguments of `LossModel`; those that Trainer
        does not have count 0.
        """
        count = self.args.gradient_accumulation_steps
        # Trainer divides a loss that is no share by the batches of the update
        divisor = 1 if self.gives_shares(items) else len(batches)
        microbatches = []
        for i in range(count):
            # the last batch again in the place of one that lacks: its loss counts 0, its shapes fit
            batch = self._fill(batches[min(i, len(batches) - 1)])
            samples = count_samples(batch)
            share = torch.tensor([count if i < len(batches) else 0, divisor])
            inputs = {"inputs": batch, "loss_share": share.repeat(samples, 1)}
            if items is not None:
                # one number for each sample, because microbatches are cut along their samples
                inputs["num_items_in_batch"] = torch.as_tensor(items).cpu().repeat(samples)
            microbatches.append(inputs)
        return microbatches

    def _fill(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        """Fill up the last batch of an epoch with samples whose labels are ignored, on processes
        and where labels can be.
        """
        missing = self.args.train_batch_size - count_samples(batch)
        # Trainer, too, takes batches of any size
        if self._config.backend.facts.takes_any_size or missing <= 0 or not self.can_ignore(batch):
            return dict(batch)
        repeated = map_tensors(
            lambda t: torch.cat([t, t[-1:].expand(missing, *t.shape[1:])]), batch
        )
        for name in set(LABELS) & set(repeated):
            repeated[name][-missing:] = IGNORED_LABEL
        return repeated  # type: ignore[no-any-return]

    # ---- training

    def hyperparameter_search(self, *args: Any, **kwargs: Any) -> Any:
        """Search as Trainer does, in one process only, because several processes would draw
        different trials.
        """
        if is_distributed():
            raise BadInput(
                "hyperparameter_search: every process would draw other values: search in one "
                "process"
            )
        return super().hyperparameter_search(*args, **kwargs)

    def _inner_training_loop(self, *args: Any, **kwargs: Any) -> Any:
        """Train and remove the pipeline afterwards. Return the first process's result on all
        processes.
        """
        self.callback_handler.is_training = is_distributed()
        self._reported = 0
        try:
            output = super()._inner_training_loop(*args, **kwargs)
        finally:
            self.callback_handler.is_training = False
            if self._pipe is not None:
                # an error has ended the run: report it, not one that follows from it
                self._pipe.abort()
                self._release()
        self.state, output = run_on_main(lambda: (self.state, output))
        self.state.is_local_process_zero = self.is_local_process_zero()
        self.state.is_world_process_zero = self.is_world_process_zero()
        return output

    def _prepare_for_training(
        self, max_steps: int, train_dataloader: Any, resume_from_checkpoint: str | None
    ) -> Any:
        """Make the pipeline, and load its checkpoint. Return model and data as Trainer asks."""
        self.create_optimizer()
        self._optimizer = self.optimizer
        if hasattr(self._optimizer, "train"):
            raise BadInput(
                f"optim: {type(self._optimizer).__name__}: uses other weights for evaluation: "
                f"unsupported"
            )
        # decided once: evaluations and callbacks leave other modes, which Trainer ends by
        # model.train()
        enter_training(self.model)
        model = LossModel(self, self.model)
        self._modes = {module: module.training for module in model.modules()}
        # by the names of `LossModel`, which has the model as its child
        self._names = {p: f"model.{name}" for name, p in self.model.named_parameters()}
        self._pipe = self._make_pipeline(model, len(train_dataloader))
        self._has_stepped = False
        self.optimizer = self._pipe.optimizer
        super()._prepare_for_training(max_steps, train_dataloader, resume_from_checkpoint)
        if resume_from_checkpoint is not None:
            self._pipe.load_state_dict(self._take_loaded_state(model))
        self._batches = SeededBatches(train_dataloader, self.args.seed)
        return model, torch.utils.data.DataLoader(
            self._batches, batch_size=None, collate_fn=_pass_on
        )

    def _make_pipeline(self, model: nn.Module, batches_per_epoch: int) -> Pipeline:
        """Make the pipeline of the settings in `pipeline`."""
        config = self._config
        count = self.args.gradient_accumulation_steps
        settings = {
            key: value
            for key, value in self._settings.items()
            if key not in ("clip", "backend", "method_args")
        }
        if isinstance(settings.get("stages"), list):
            # as above: the user names modules of the model
            settings["stages"] = [f"model.{name}" for name in settings["stages"]]
        method_args = dict(self._settings.get("method_args") or {})
        warmup = config.method_settings().get("warmup", {"epochs": 0})["epochs"]
        method_args.pop("warmup", None)
        method = resolve_method(config.method, config.method_settings())
        # of a replica or stage that takes its own
        takes_one = method.rounds is not None or method.history is not None
        pipe = Pipeline(
            model,
            None,
            self._optimizer,
            microbatches=1 if takes_one else count,
            method_args=method_args,
            # a config has epochs, a loop counts in updates
            warmup=round(warmup * -(-batches_per_epoch // count)),
            clip=None if config.clip is None else (config.clip.norm, config.clip.scope),
            seed=self.args.seed,
            backend=config.backend.name,
            backend_args={
                key: value for key, value in self._settings["backend"].items() if key != "name"
            },
            # Trainer, too, goes on after a loss that is not finite
            **{"allow_nonfinite": True, **settings},
        )
        if pipe.microbatches != count:
            why = (
                f"{config.method} takes {pipe.microbatches} microbatches in an update: must be "
                f"as many"
            )
            raise BadInput(f"gradient_accumulation_steps: {count}: {why}")
        return pipe

    def _take_loaded_state(self, model: nn.Module) -> dict[str, Any]:
        """Move the state that Trainer has loaded into a state of the pipeline, which was empty when
        it was saved.
        """
        done = self.state.global_step
        tensors, plain = export_state(self._optimizer, self._names)
        # a process keeps the state of its own stages alone
        self._optimizer.state.clear()
        return {
            "format": FIRST_FORMAT,
            "method": self._config.method,
            "model": model.state_dict(),
            "optimizer": tensors,
            "plain": plain,
            "updates": done,
            "drains": [done],
        }

    def _run_epoch(self, *args: Any, **kwargs: Any) -> None:
        """Run an epoch as Trainer does."""
        self._batches.epoch = kwargs["epoch"]
        # a callback may have ended the last epoch within an update
        self._gathered = []
        super()._run_epoch(*args, **kwargs)

    def training_step(
        self, model: nn.Module, inputs: Mapping[str, Any], num_items_in_batch: Any = None
    ) -> torch.Tensor:
        """Gather the batches of an update, and give them to the pipeline. Return the losses of the
        updates that left it.
        """
        self._gathered.append(inputs)
        if len(self._gathered) < self.current_gradient_accumulation_steps:
            return torch.zeros_like(self._tr_loss)
        batches = self._gathered
        self._gathered = []
        # evaluations between two updates leave other modes
        for module, mode in self._modes.items():
            module.training = mode
        assert self._pipe is not None
        microbatches = self._make_microbatches(batches, num_items_in_batch)
        self._has_stepped = True
        return self._sum_losses(
            self._pipe.step(microbatches=[(inputs, None) for inputs in microbatches])
        )

    def _clip_grad_norm(self, model: nn.Module) -> None:
        """Do nothing: the pipeline clips."""

    def _get_grad_norm(self, model: nn.Module, grad_norm: Any = None) -> None:
        """Return None: the stages' gradients exist at different times."""

    def _finalize_training(self, *args: Any, **kwargs: Any) -> Any:
        assert self._pipe is not None
        self._add_losses(self._pipe.close())
        self._release()
        return super()._finalize_training(*args, **kwargs)

    def _release(self) -> None:
        """Forget the pipeline, and take back the optimizer itself."""
        self._pipe = None
        self.optimizer = self._optimizer

    # ---- losses, which leave the pipeline later than Trainer counts updates

    def _sum_losses(self, updates: Sequence[Update]) -> torch.Tensor:
        """Return the sum of the losses of updates, and count them."""
        self._reported += len(updates)
        losses = [update.loss for update in updates if update.loss is not None]
        return torch.tensor(sum(losses), dtype=self._tr_loss.dtype, device=self._tr_loss.device)

    def _add_losses(self, updates: Sequence[Update]) -> None:
        """Add the losses of updates that left in a drain to the next line of the log, as Trainer
        adds those of a step.
        """
        loss = self._sum_losses(updates)
        if self.args.logging_nan_inf_filter and not torch.isfinite(loss):
            loss = self._tr_loss / (1 + self.state.global_step - self._globalstep_last_logged)
        self._tr_loss += loss

    def _is_drained_next(self) -> bool:
        """Return whether the pipeline drains before the next update: for an evaluation or a
        checkpoint, or at the end.
        """
        args = self.args
        state = self.state
        control = self.control
        if control.should_evaluate or control.should_save:
            return True
        if control.should_training_stop or state.global_step >= state.max_steps:
            return True
        # at the end of an epoch Trainer logs first, and evaluates and saves later
        evaluates = args.eval_strategy == "epoch" and args.eval_delay <= state.epoch
        return state.epoch == int(state.epoch) and (evaluates or args.save_strategy == "epoch")

    def _maybe_log_save_evaluate(self, tr_loss: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        """Log, save and evaluate as Trainer does; a line of the log has the mean loss of the
        updates that left since the last.
        """
        assert self._pipe is not None
        if self._is_drained_next() and self._pipe.can_drain:
            # so that this line has all losses
            self._add_losses(self._pipe.drain())
        steps = self.state.global_step - self._globalstep_last_logged
        surplus = 0.0
        if self.control.should_log and steps:
            # nothing has left a pipeline that fills
            self.control.should_log = self._reported > 0
            # Trainer divides by its steps
            scale = steps / max(self._reported, 1)
            surplus = tr_loss.item() * (scale - 1)
            tr_loss *= scale
            self._reported = 0
        with contextlib.ExitStack() as self._until_saved:
            super()._maybe_log_save_evaluate(tr_loss, *args, **kwargs)
        # the total is of the whole training, which this line's scale must not change
        self._total_loss_scalar -= surplus

    # ---- the whole model, in an epoch and between

    @contextlib.contextmanager
    def _hold_whole_model(self) -> Iterator[None]:
        """Drain, and hold the whole model with its newest weights in every process."""
        if self._pipe is None or self._is_whole or not self._has_stepped:
            yield
            return
        handler = self.callback_handler
        if handler.is_training and handler.event:
            raise BadInput(f"{handler.event}: {APART}")
        self._add_losses(self._pipe.drain())
        with self._pipe.whole_model(everywhere=True):
            self._is_whole = True
            try:
                yield
            finally:
                self._is_whole = False

    def evaluate(self, *args: Any, **kwargs: Any) -> Any:
        """Evaluate as Trainer does. In training return the first process's metrics on all
        processes, which decide by them.
        """
        metrics = super().evaluate(*args, **kwargs)
        return run_on_main(lambda: metrics) if self.callback_handler.is_collective else metrics

    def _evaluate(self, *args: Any, **kwargs: Any) -> Any:
        """Evaluate as Trainer does, and keep the whole model for the callbacks."""
        self._until_saved.enter_context(self._hold_whole_model())
        return super()._evaluate(*args, **kwargs)

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
        """Evaluate or predict as Trainer does, on the whole model."""
        with self._hold_whole_model():
            return super().evaluation_loop(*args, **kwargs)

    def save_model(self, *args: Any, **kwargs: Any) -> None:
        """Save the model, or its adapters, as Trainer does."""
        with self._hold_whole_model():
            super().save_model(*args, **kwargs)

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        """Write a checkpoint that Trainer, too, can resume from."""
        assert self._pipe is not None
        self._until_saved.enter_context(self._hold_whole_model())
        state = self._pipe.state_dict()
        save = super()._save_checkpoint

        def write() -> Any:
            # of the stages of this process
            state_here = dict(self._optimizer.state)
            # the whole state for the file, and this process's own again afterwards
            import_state(self._optimizer, self._names, state["optimizer"], state["plain"])
            save(model, trial)
            self._optimizer.state.clear()
            self._optimizer.state.update(state_here)
            return self.state.best_model_checkpoint

        # an error, such as a full disk, reaches the processes that wait
        self.state.best_model_checkpoint = run_on_main(write)


def _pass_on(batch: Any) -> Any:
    """Return a batch that is ready."""
    return batch
