"""The precision of a run: convert a model to it, and convert it back at the end.

    float32, float64, bfloat16   the whole model has that dtype
    bfloat16_mixed               weights stay float32; the model's forward and the loss run under autocast
    bfloat16_masters             weights are bfloat16, with float32 masters (`Masters`)

Autocast surrounds the model's own `forward` and the loss, whoever calls them, and no backward.
Losses are float32.
"""

from __future__ import annotations

import contextlib
import functools
import types
from typing import Any, Callable, Collection, ContextManager, Iterable, Iterator, List, Tuple

import torch
from torch import nn
from torch.utils._pytree import tree_map

from ipu_pipe.model.loss import Loss, LossOfOutput, OwnLoss, get_block_loss, get_plain_loss


def _name_dtype(dtype: torch.dtype) -> str:
    return str(dtype).partition(".")[2]


class LossInFloat32:
    """The loss `plain` as a float32 number: under autocast of `device`, or of the outputs in
    float32 if `device` is None.
    """

    def __init__(self, plain: Callable[..., torch.Tensor], device: str | None) -> None:
        self.plain = plain
        self._device = device

    def __call__(self, output: Any, y: Any, **asked: Any) -> torch.Tensor:
        if self._device is None:
            return self.plain(tree_map(_widen, output), y, **asked).float()
        with enter_autocast(self._device):
            return self.plain(output, y, **asked).float()


def _widen(value: Any) -> Any:
    return value.float() if isinstance(value, torch.Tensor) and value.dtype is LOW else value


def get_uncast_loss(loss: Any) -> Any:
    """Return the loss without the conversion to float32."""
    return loss.plain if isinstance(loss, LossInFloat32) else loss


def get_user_loss(loss: Loss) -> Any:
    """Return the loss as its author wrote it, without the parts that this library puts around
    it.
    """
    return get_uncast_loss(get_plain_loss(get_block_loss(loss)))


def export_loss(loss: Any) -> dict[str, Any]:
    """Return a copy of the state of a user's loss that is a module, on the host; {} for another."""
    plain = get_user_loss(loss)
    state = plain.state_dict() if isinstance(plain, nn.Module) else {}
    return {
        name: value.detach().cpu().clone() if isinstance(value, torch.Tensor) else value
        for name, value in state.items()
    }


class ModelPrecision:
    """A model in the precision of a run: the constructor converts it, `give_back` restores it.

    `row`: a key of hardware.precision.PRECISIONS; `inputs`: the dtype of the model's inputs;
    `labels`: the dtype of labels that are not integers; `is_given`: the model is the caller's,
    whose dtypes are restored at the end.
    """

    def __init__(
        self, model: nn.Module, row: str, dtype: torch.dtype, device: torch.device, is_given: bool
    ) -> None:
        """Convert the model; `dtype`: the dtype of the weights."""
        self.row = row
        self.is_given = is_given
        self._model = model
        self._dtype = dtype
        # the dtypes that a caller's model has now
        modules, parameters = (
            (list(model.modules()), list(model.parameters())) if is_given else ([], [])
        )
        self._given_types = [(p, p.dtype) for p in parameters if p.is_floating_point()]
        self._given_buffers = [
            (module, name, buffer.dtype)
            for module in modules
            for name, buffer in module._buffers.items()
            if buffer is not None and (buffer.is_floating_point() or buffer.is_complex())
        ]
        # and their values, which a conversion to fewer bits loses, until the run is built
        self._given_values = [(p, p.data) for p in parameters]
        self._given_buffer_values = [
            (module, name, module._buffers[name]) for module, name, _ in self._given_buffers
        ]
        # the masters; or the shards of weights that the caller has sharded (`model.shards`)
        self.masters: Any = None
        # the masters at the end of the last step of weights that the caller has written since
        self._replaced_masters: dict[str, torch.Tensor] = {}
        # of stages on other ranks that a caller has sharded: the share that a rank holds
        self.shares: dict[int, float] = {}
        self.inputs = self.labels = dtype
        self._autocast: str | None = None
        try:
            if row == "bfloat16_masters":
                self.labels = torch.float32
                self.masters = Masters(model, device)
            else:
                _convert(model, device, dtype)
            # torch has no autocast for the meta device
            if row == "bfloat16_mixed" and device.type != "meta":
                self._autocast = device.type
                cast_forward(model, device.type)
        # a caller's model must not stay half converted
        except BaseException:
            self.give_back()
            raise

    def convert_loss(self, loss: Loss) -> Loss:
        """Return the loss of the model's outputs in this precision."""
        # a model's own loss keeps the precision of the forward that computes it
        if self.row not in ("bfloat16_mixed", "bfloat16_masters") or isinstance(loss, OwnLoss):
            return loss
        if isinstance(loss, LossOfOutput):
            return LossOfOutput(LossInFloat32(loss.plain, self._autocast), loss.take, loss.asks)
        return LossInFloat32(loss, self._autocast)

    def put_masters_in_place(self, loads: bool = False) -> ContextManager[None]:
        """Put the masters, if there are any, into the model inside the context, to save them, or
        with `loads` to replace them.
        """
        return (
            self.masters.put_in_place(loads)
            if self.masters is not None
            else contextlib.nullcontext()
        )

    def put_rounded(self) -> ContextManager[None]:
        """Put the weights that passes read into the model inside the context, where
        `put_masters_in_place` has put others.
        """
        masters = self.masters
        return contextlib.nullcontext() if masters is None else masters.put_rounded()

    def get_trained(self, weight: nn.Parameter) -> nn.Parameter:
        """Return the parameter that the optimizer updates for this weight: its master, or the
        weight itself.
        """
        return self.masters.get(weight) if self.masters is not None else weight

    @property
    def is_sharded(self) -> bool:
        """Whether a caller has sharded weights of this rank."""
        return self.masters is not None and self.masters.are_in_weights

    @property
    def has_rounded_weights(self) -> bool:
        """Whether passes read weights that are rounded from masters."""
        return self.masters is not None and not self.masters.are_in_weights

    def take_written(self, names: Collection[str]) -> None:
        """Take over those of these weights that have a master from what the caller has written; a
        value that is still the rounded master leaves it as it is.
        """
        if not (names and self.has_rounded_weights):
            return
        for name, weight in self._model.named_parameters(remove_duplicate=False):
            if name not in names:
                continue
            master = self.get_trained(weight)
            present = master.data
            # a loop that evaluates other weights puts the rounded ones back
            before = self._replaced_masters.setdefault(name, present)
            value = weight.data.to(master.dtype)
            for exact in (before, present):
                value = torch.where(weight.data == exact.to(weight.dtype), exact, value)
            master.data = value

    def forget_written(self) -> None:
        """Forget the masters that were replaced since the last step."""
        self._replaced_masters.clear()

    @property
    def record(self) -> dict[str, str | None]:
        """The dtypes that passes read and compute in, and the dtype of the masters."""
        masters = "float32" if self.masters is not None else None
        computes = "bfloat16" if self._autocast is not None else None
        return {"weights": _name_dtype(self._dtype), "autocast": computes, "masters": masters}

    def list_other_dtypes(self) -> list[str]:
        """Return the dtypes of the caller's model in which it does not train."""
        kinds = {kind for _, kind in self._given_types} - {self._dtype}
        return sorted(map(_name_dtype, kinds)) if self.row != "bfloat16_masters" else []

    def forget_given_values(self) -> None:
        """Forget the values that the caller's model came with: from now on it is trained."""
        self._given_values = []
        self._given_buffer_values = []

    def give_back(self, keep: bool = False) -> None:
        """Restore the model's dtypes and forward, with the trained weights, or those that it came
        with if the run was not built.

        `keep`: leave the dtypes of training.
        """
        uncast_forward(self._model)
        # first the masters, which are the trained weights, then their dtypes
        if not keep and self.masters is not None:
            self.masters.take_over()
        for parameter, dtype in () if keep else self._given_types:
            if parameter.dtype != dtype:
                # a gradient of the old dtype would not fit the parameter
                parameter.grad = None
                # through `data`, because the caller's optimizer has the parameter itself
                parameter.data = parameter.data.to(dtype)
        for module, name, dtype in () if keep else self._given_buffers:
            buffer = module._buffers.get(name)
            if buffer is not None:
                module._buffers[name] = buffer.to(dtype)
        for parameter, value in self._given_values:
            parameter.data = value
        for module, name, buffer in self._given_buffer_values:
            module._buffers[name] = buffer


LOW = torch.bfloat16


def _convert(model: nn.Module, device: torch.device, dtype: torch.dtype) -> None:
    """Move a model to a device and a dtype. Complex buffers stay complex, which `nn.Module.to`
    would make real.
    """
    complex_dtype = torch.complex128 if dtype is torch.float64 else torch.complex64
    buffers = [
        (module, name, b) for module in model.modules() for name, b in module._buffers.items()
    ]
    complex_buffers = [
        (module, name, b) for module, name, b in buffers if b is not None and b.is_complex()
    ]
    for module, name, _ in complex_buffers:
        module._buffers[name] = None
    try:
        model.to(device, dtype)
    finally:
        for module, name, buffer in complex_buffers:
            module._buffers[name] = buffer.to(device, complex_dtype)


Pairs = List[Tuple[nn.Parameter, nn.Parameter]]


class Masters:
    """The float32 copies of a model's weights, which the constructor rounds to bfloat16 in the
    model.
    """

    are_in_weights = False

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        norms = [
            module.float()
            for module in model.modules()
            if isinstance(module, nn.modules.batchnorm._BatchNorm)
        ]
        norm_tensors = {id(t) for norm in norms for t in [*norm.parameters(), *norm.buffers()]}
        model.to(device)
        self._masters: dict[nn.Parameter, nn.Parameter] = {}
        for weight in model.parameters():
            if weight.is_floating_point() and id(weight) not in norm_tensors:
                self._masters[weight] = nn.Parameter(weight.detach().float(), weight.requires_grad)
                weight.data = weight.data.to(LOW)
                if weight.grad is not None:
                    # a gradient of the caller's follows, as in `nn.Module.to`
                    weight.grad = weight.grad.to(LOW)
        self._weights = {id(master): weight for weight, master in self._masters.items()}
        for module in model.modules():
            if not any(module is norm for norm in norms):
                for name, buffer in module._buffers.items():
                    if buffer is not None and buffer.is_floating_point():
                        module._buffers[name] = buffer.to(LOW)

    def get(self, weight: nn.Parameter) -> nn.Parameter:
        """Return the master of a weight; the weight itself if it has none."""
        return self._masters.get(weight, weight)

    def get_weight(self, parameter: Any) -> Any:
        """Return the weight of a master; another parameter itself."""
        return self._weights.get(id(parameter), parameter)

    def list_pairs(self, masters: Iterable[nn.Parameter]) -> Pairs:
        """Return (weight, master) for each of `masters` that is not itself a weight of the
        model.
        """
        return [(self._weights[id(m)], m) for m in masters if id(m) in self._weights]

    def collect_gradients(self, pairs: Pairs) -> None:
        """Add the weights' gradients to their masters' after a backward."""
        for weight, master in pairs:
            if weight.grad is not None:
                if master.grad is None:
                    # of several microbatches: the sum is made in float32
                    master.grad = weight.grad.float()
                else:
                    master.grad += weight.grad
                # the next backward begins anew, so that no gradient is added twice
                weight.grad = None

    def write_weights(self, pairs: Pairs) -> None:
        """Round the masters into the weights after an update."""
        for weight, master in pairs:
            weight.data.copy_(master.data)

    @contextlib.contextmanager
    def put_in_place(self, loads: bool = False) -> Iterator[None]:
        """Put the masters into the model inside the context, and the rounded weights afterwards,
        newly rounded with `loads`.
        """
        rounded_weights = [weight.data for weight in self._masters]
        try:
            for weight, master in self._masters.items():
                weight.data = master.data
            yield
        finally:
            for (weight, master), rounded in zip(self._masters.items(), rounded_weights):
                if loads:
                    # loading may have replaced the tensor
                    master.data = weight.data
                weight.data = master.data.to(LOW) if loads else rounded

    @contextlib.contextmanager
    def put_rounded(self) -> Iterator[None]:
        """Round the weights inside the context, if the masters are in their place, for a pass."""
        in_place = [weight for weight in self._masters if weight.dtype != LOW]
        masters = [weight.data for weight in in_place]
        try:
            for weight in in_place:
                weight.data = weight.data.to(LOW)
            yield
        finally:
            for weight, master in zip(in_place, masters):
                weight.data = master

    def take_over(self) -> None:
        """Put the masters into the model permanently."""
        for weight, master in self._masters.items():
            weight.grad = None
            weight.data = master.data


# the attribute of a model with the device type whose operations are cast
_DEVICE = "_ipu_pipe_autocast"


def enter_autocast(device: str) -> ContextManager[Any]:
    """Cast operations of a device type to bfloat16, where PyTorch considers that safe."""
    return torch.autocast(device, torch.bfloat16)


def is_cast(model: nn.Module) -> bool:
    """Tell whether a model's forward runs under autocast."""
    return _DEVICE in vars(model)


def enter_model_autocast(model: nn.Module) -> ContextManager[Any]:
    """Enter the autocast of a model's forward, to run a part of it; nothing if it has none."""
    return enter_autocast(vars(model)[_DEVICE]) if is_cast(model) else contextlib.nullcontext()


def cast_forward(model: nn.Module, device: str) -> None:
    """Make a model's forward run under autocast from now on."""
    # a user may have replaced the forward of this one instance
    own_forward = vars(model).get("forward")

    @functools.wraps(type(model).forward)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        with enter_model_autocast(self):
            return (
                own_forward(*args, **kwargs)
                if own_forward is not None
                else type(self).forward(self, *args, **kwargs)
            )

    forward.own = own_forward  # type: ignore[attr-defined]
    # a bound method, so that a deep copy of the model binds its own
    vars(model).update({_DEVICE: device, "forward": types.MethodType(forward, model)})


def uncast_forward(model: nn.Module) -> None:
    """Restore a model's own forward."""
    if vars(model).pop(_DEVICE, None) is not None:
        own_forward = vars(model).pop("forward").__func__.own
        vars(model).update({} if own_forward is None else {"forward": own_forward})


@contextlib.contextmanager
def restore_forward(model: nn.Module) -> Iterator[None]:
    """Restore a model's own forward inside the context."""
    device = vars(model).get(_DEVICE)
    uncast_forward(model)
    try:
        yield
    finally:
        if device is not None:
            cast_forward(model, device)
