"""The executable: a private copy of the model with the device's weights, run micro-batch by micro-batch on the CPU.

    one call      D device iterations, each one weight update (training)
    one iteration R replicas x GA micro-batches of b samples; sample order of the input: (D, GA, R, b)  [U]
    one update    gradients summed over GA in each replica, then over replicas, then divided (Mean, Post) ...

The copy is made when the model is compiled, so that modes, Python attributes and control flow are frozen there.
"""

from __future__ import annotations

import contextlib
import copy
from typing import Any, Dict, Iterator, List, Mapping, Optional, Sequence, Tuple

import torch
from torch.utils._pytree import tree_flatten, tree_unflatten

from poptorch import _optimizers, _trace, enums
from poptorch._errors import DoubleRefuses, make_cpp_error, make_py_error
from poptorch._trace import Layout, Trace

# the IPU's types in place of wider ones
NARROWED = {torch.float64: torch.float32, torch.int64: torch.int32}
WIDE = 2**31


def copy_without_wrappers(model: torch.nn.Module) -> torch.nn.Module:
    """Copy a model deeply, without the wrappers of PopTorch that it may have; nothing is copied from the device."""
    wrapped = [t for t in [*model.parameters(), *model.buffers()] if hasattr(type(t), "_unwrapped")]
    classes = [type(t) for t in wrapped]
    for tensor in wrapped:
        tensor.__class__ = type(tensor)._unwrapped
    kind = type(model)
    base = getattr(kind, "_unwrapped_model", kind)
    try:
        object.__setattr__(model, "__class__", base)
        return copy.deepcopy(model)
    finally:
        object.__setattr__(model, "__class__", kind)
        for tensor, cls in zip(wrapped, classes):
            tensor.__class__ = cls


class Program:
    """The model on the device. `buffers[r]`: the buffers of replica r; the parameters are the
    same on all replicas."""

    def __init__(self, model: torch.nn.Module, options: Any, training: bool, seed: int) -> None:
        self.model = copy_without_wrappers(model)
        self.options, self.training = options, training
        self.dtypes = {name: t.dtype for name, t in self._list_tensors()}
        self.model.float()  # float64 becomes float32; float16 is computed in float32 and rounded when stored
        self.half = torch.float16 in self.dtypes.values()
        self.replicas: int = options.replication_factor
        self.accumulation: int = options.Training.gradient_accumulation
        self.iterations: int = options.device_iterations
        self.buffers: List[Dict[str, torch.Tensor]] = []
        self.twin: Optional[_optimizers.Twin] = None
        self.loss_at: Optional[int] = None
        self.static: Any = None  # outputs of the trace other than tensors
        self.strategy: Any = None
        self._random = torch.Generator().manual_seed(seed).get_state()
        self.seed = seed
        self._take_buffers()

    # -- weights

    def _list_tensors(self) -> List[Tuple[str, torch.Tensor]]:
        return [*self.model.named_parameters(), *self.model.named_buffers()]

    def parameters(self) -> Dict[str, torch.Tensor]:
        return dict(self.model.named_parameters())

    def _take_buffers(self) -> None:
        now = {name: b.detach().clone() for name, b in self.model.named_buffers()}
        self.buffers = [{name: b.clone() for name, b in now.items()} for _ in range(self.replicas)]

    def _load_buffers(self, replica: int, constants_alone: bool = False) -> None:
        """Load a replica's buffers, or its integer buffers alone, which are constants of the
        compiled model."""
        for name, buffer in self.model.named_buffers():
            if not (constants_alone and buffer.is_floating_point()):
                buffer.data.copy_(self.buffers[replica][name])

    def _store_buffers(self, replica: int) -> None:
        for name, buffer in self.model.named_buffers():
            if buffer.is_floating_point():  # others are constants of the graph (JitDispatch.cpp)
                self.buffers[replica][name] = buffer.detach().clone()

    @torch.no_grad()
    def upload(self, host: Mapping[str, torch.Tensor]) -> None:
        for name, tensor in self._list_tensors():
            if tensor.is_floating_point():
                tensor.copy_(host[name])
        self._take_buffers()

    @torch.no_grad()
    def download(self, host: Mapping[str, torch.Tensor]) -> None:
        """Copy the parameters, and the first replica's buffers, to the host."""
        self._load_buffers(0)
        for name, tensor in self._list_tensors():
            if tensor.is_floating_point():
                host[name].copy_(tensor)

    def _round_to_half(self) -> None:
        """Round parameters that are stored as float16."""
        if self.half:
            with torch.no_grad():
                for name, tensor in self.model.named_parameters():
                    if self.dtypes[name] == torch.float16:
                        tensor.copy_(tensor.half())

    # -- inputs and outputs

    @property
    def microbatches(self) -> int:
        """Return the number of microbatches in one call's input."""
        return self.iterations * self.accumulation * self.replicas

    def check_inputs(self, inputs: Sequence[torch.Tensor]) -> None:
        for place, tensor in enumerate(inputs):
            size = tensor.shape[0] if tensor.dim() else 1
            assert size % self.microbatches == 0, (
                f"Invalid batch dimension: In the input {tensor.shape}, the batch dimension ({size}) must be a multiple of "
                f"{self.iterations} * {self.replicas} * {self.accumulation} = {self.microbatches}"
            )
            if tensor.requires_grad:  # PopTorch detaches some of them with a warning
                raise make_py_error(
                    f"An input tensor to an IPU model can not have requires_grad set to True: input {place}"
                )
            if tensor.dtype == torch.bfloat16 or tensor.is_complex() or tensor.is_quantized:
                raise make_cpp_error(f"Unsupported tensor input type from pytorch: {tensor.dtype}")

    def cut_microbatch(self, structure: Any, index: int) -> Any:
        """Return microbatch `index` of a call's input in the device's types, as a copy, which
        the model may write into."""

        def cut(tensor: torch.Tensor) -> torch.Tensor:
            if tensor.dim():
                size = tensor.shape[0] // self.microbatches
                tensor = tensor[index * size : (index + 1) * size]
            if tensor.dtype == torch.int64 and tensor.numel() and int(tensor.abs().max()) >= WIDE:
                raise DoubleRefuses(
                    "int64 values beyond 2**31: PopTorch makes them int32 without a word"
                )
            return (
                tensor.float() if tensor.dtype in (torch.float64, torch.float16) else tensor.clone()
            )

        return _trace.map_tensors(structure, cut)

    def _narrow_outputs(self, structure: Any) -> Any:
        def narrow(tensor: torch.Tensor) -> torch.Tensor:
            tensor = tensor.detach()
            if (
                self.half and tensor.dtype == torch.float32
            ):  # [U] of mixed graphs some outputs are float32
                return tensor.half()
            return tensor.to(NARROWED.get(tensor.dtype, tensor.dtype)).clone()

        return _trace.map_tensors(structure, narrow)

    # -- tracing

    def trace(self, arguments: Any, strategy: Any) -> Tuple[Trace, Layout, List[Any]]:
        """Trace one forward of the first microbatch, with all checks; leave weights and random
        state unchanged."""
        args, kwargs = self.cut_microbatch(arguments, 0)
        halves = any(t.dtype == torch.float16 for t in _trace.list_tensors(arguments))
        tensors = _trace.list_tensors((args, kwargs))
        trace = Trace(strategy, self.model, tensors, self.training, halves and not self.half)
        buffers = dict(self.model.named_buffers())
        versions = {name: b._version for name, b in buffers.items()}
        attributes = _list_plain_attributes(self.model)
        with self._enter_device(), torch.set_grad_enabled(self.training), trace:
            result = self.model(*args, **kwargs)
        self._check_unchanged(buffers, attributes)
        written = [b for name, b in buffers.items() if b._version != versions[name]]
        if written and self.replicas > 1 and self.options.broadcast_buffers:
            raise make_cpp_error("PopTorch does not support broadcasting buffers.")
        with torch.no_grad():
            self._load_buffers(0)
        leaves = _trace.list_leaves(result)
        ops = trace.keep_needed(
            [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)], written
        )
        losses, self.loss_at = _trace.find_losses(ops, leaves, self.training)
        if self.loss_at is not None and not leaves[self.loss_at].requires_grad:
            raise make_cpp_error("The final loss depends on no parameter that requires a gradient")
        layout = _trace.lay_out(trace, ops, losses, self.parameters())
        self.static = _trace.map_tensors(result, lambda tensor: None)
        return trace, layout, losses

    def _check_unchanged(
        self, buffers: Mapping[str, torch.Tensor], attributes: Mapping[str, Any]
    ) -> None:
        now = dict(self.model.named_buffers())
        for name in buffers:
            if now.get(name) is not buffers[name]:
                raise make_py_error(
                    f"Buffer {name} is reassigned within the model when calling the forward method."
                )
        for name, value in _list_plain_attributes(self.model).items():
            if attributes.get(name, value) != value or name not in attributes:
                raise DoubleRefuses(f"the forward changes {name}: PopTorch runs Python once")

    # -- running

    @contextlib.contextmanager
    def _enter_device(self) -> Iterator[None]:
        """Use the device's random numbers."""
        with torch.random.fork_rng(devices=[]):
            torch.set_rng_state(self._random)
            yield

    def run(self, arguments: Any) -> Any:
        """Execute one call's input, and return the outputs in the output mode."""
        outputs: Dict[Tuple[int, int, int], Any] = {}
        with self._enter_device(), torch.set_grad_enabled(self.training):
            for iteration in range(self.iterations):
                gradients = [
                    self._run_replica(arguments, iteration, r, outputs)
                    for r in range(self.replicas)
                ]
                if self.training:
                    self._update(gradients)
            self._random = torch.get_rng_state()
        return self._gather_outputs(outputs)

    def _run_replica(
        self, arguments: Any, iteration: int, replica: int, outputs: Any
    ) -> Dict[str, torch.Tensor]:
        """Run one replica's microbatches of one iteration; return its accumulated gradients."""
        if self.replicas > 1:
            with torch.no_grad():
                self._load_buffers(replica)
        self.model.zero_grad(set_to_none=True)
        for index in range(self.accumulation):
            part = (iteration * self.accumulation + index) * self.replicas + replica
            args, kwargs = self.cut_microbatch(arguments, part)
            self._load_buffers(replica, constants_alone=True)
            result = self.model(*args, **kwargs)
            if self.training:
                self._backward(_trace.list_leaves(result)[self.loss_at], index)
            outputs[iteration, index, replica] = self._narrow_outputs(result)
        self._store_buffers(replica)
        return {name: p.grad for name, p in self.model.named_parameters() if p.grad is not None}

    def _backward(self, loss: torch.Tensor, index: int) -> None:
        """Add the microbatch's gradients; with Running, store their mean so far."""
        start, strategy = torch.ones_like(loss), enums.MeanReductionStrategy
        if self.strategy == strategy.Running:
            for p in self.model.parameters():
                if p.grad is not None:
                    p.grad.mul_(index / (index + 1))
            start /= index + 1
        elif self.strategy == strategy.PostAndLoss:
            start /= self.replicas
        loss.backward(start)

    def _update(self, gradients: Sequence[Mapping[str, torch.Tensor]]) -> None:
        strategy, count = enums.MeanReductionStrategy, self.replicas * self.accumulation
        divisor = {
            strategy.Running: self.replicas,
            strategy.Post: count,
            strategy.PostAndLoss: self.accumulation,
        }[self.strategy]
        for name, p in self.model.named_parameters():
            shares = [one[name] for one in gradients if name in one]
            p.grad = None
            if shares:
                p.grad = sum(shares[1:], shares[0]) / divisor
        assert self.twin is not None
        self.twin.step(count if self.strategy == strategy.Post else 1.0)
        self._round_to_half()
        self.model.zero_grad(set_to_none=True)

    # -- output modes

    def _gather_outputs(self, outputs: Mapping[Tuple[int, int, int], Any]) -> Any:
        """Return the outputs in the output mode. Final: the last microbatch of every replica;
        All; Sum: over all, of every replica."""
        steps = [(d, g) for d in range(self.iterations) for g in range(self.accumulation)]
        mode = enums.OutputMode(self.options.output_mode)
        chosen = steps[-1:] if mode == enums.OutputMode.Final else steps
        leaves = [
            [_trace.list_leaves(outputs[d, g, r]) for r in range(self.replicas)] for d, g in chosen
        ]
        results = []
        for place, leaf in enumerate(leaves[0][0]):
            if not isinstance(leaf, torch.Tensor):
                results.append(_trace.list_leaves(self.static)[place])
                continue
            steps_of = [[replica[place] for replica in step] for step in leaves]
            if mode == enums.OutputMode.Sum:
                steps_of = [[sum(values[1:], values[0]) for values in zip(*steps_of)]]
            values = [value for step in steps_of for value in step]
            join = torch.cat if values[0].dim() else torch.stack  # scalars become a vector
            results.append(join(values) if len(values) > 1 else values[0])
        return tree_unflatten(results, tree_flatten(self.static)[1])


def _list_plain_attributes(model: torch.nn.Module) -> Dict[str, Any]:
    """Return the plain values in the attributes of modules, without PyTorch's own."""
    return {
        f"{name}.{key}".lstrip("."): value
        for name, module in model.named_modules()
        for key, value in vars(module).items()
        if not key.startswith("_") and isinstance(value, (bool, int, float, str, type(None)))
    }
