"""Blocks and the operations that exist on the IPU only; all of them do nothing, or the plain thing, on the CPU."""

from __future__ import annotations

import functools
from typing import Any, Callable, Dict, List, Optional, Tuple, Union

import torch

from poptorch import _trace
from poptorch._errors import not_modelled, py_error
from poptorch._signatures import typed
from poptorch.enums import MatMulSerializationMode, MultiConvPlanType, OverlapMode


class Block(torch.nn.Module):
    """Context manager: what is called inside belongs to the block, and what follows belongs to none."""

    @typed("Block")
    def __init__(self, user_id: Optional[str] = None, ipu_id: Optional[int] = None) -> None:
        super().__init__()
        self._user_id, self._ipu_id = user_id, ipu_id

    @staticmethod
    @typed("Block.useAutoId")
    def useAutoId() -> None:
        if _trace.current is not None:
            _trace.current.next_auto_id = 0

    @staticmethod
    @typed("Block.start")
    def start(user_id: Optional[str] = None, ipu_id: Optional[int] = None) -> None:
        if _trace.current is not None:
            _trace.current.begin(user_id, ipu_id)

    def __enter__(self) -> None:
        if _trace.current is not None:
            _trace.current.begin(self._user_id, self._ipu_id)

    def __exit__(self, *_: Any) -> None:
        if _trace.current is not None:
            _trace.current.end()


class _BlockHook:
    """Begins the block; an automatic id is kept from the first time on."""

    def __init__(self, user_id: Optional[str], ipu_id: Optional[int]) -> None:
        self._user_id, self._ipu_id = user_id, ipu_id

    def __call__(self, module: Any, inputs: Any) -> None:
        if _trace.current is not None:
            self._user_id = _trace.current.begin(self._user_id, self._ipu_id)

    def __repr__(self) -> str:
        return f"BeginBlock(user_id={self._user_id}, ipu_id={self._ipu_id})"


class LegacyBeginBlockFn(torch.nn.Module):
    """BeginBlock of a callable that is no module."""

    def __init__(self, function: Callable[..., Any], hook: _BlockHook) -> None:
        super().__init__()
        self._function, self._hook = function, hook

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self._hook(self, args)
        return self._function(*args, **kwargs)


def _hooks(module: torch.nn.Module) -> List[int]:
    return [key for key, hook in module._forward_pre_hooks.items() if isinstance(hook, _BlockHook)]


@typed("BeginBlock", unchecked=["layer_to_call"])
def BeginBlock(layer_to_call: torch.nn.Module, user_id: str = None, ipu_id: int = None) -> torch.nn.Module:
    hook = _BlockHook(user_id, ipu_id)
    if not isinstance(layer_to_call, torch.nn.Module):
        if callable(layer_to_call):
            return LegacyBeginBlockFn(layer_to_call, hook)
        raise py_error("module is not an instance of torch.nn.Module or function.")
    if _hooks(layer_to_call):
        raise py_error("module has already been assigned to a block.")
    layer_to_call.register_forward_pre_hook(hook)
    return layer_to_call


@typed("BlockFunction")
def BlockFunction(user_id: Optional[str] = None, ipu_id: Optional[int] = None):
    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def inside(*args: Any, **kwargs: Any) -> Any:
            with Block(user_id, ipu_id):
                return function(*args, **kwargs)

        return inside

    return decorate


@typed("removeBlocks")
def removeBlocks(module):
    assert isinstance(module, torch.nn.Module)
    for inner in module.modules():
        for key in _hooks(inner):
            del inner._forward_pre_hooks[key]


@typed("module_repr")
def module_repr(m: torch.nn.Module):
    shown = [f"({name}) {m.get_submodule(name)._forward_pre_hooks[key]}"
             for name, inner in m.named_modules() for key in _hooks(inner)]  # fmt: skip
    return "\n".join([repr(m), *shown])


class NameScope:
    """Prefix of op names: without meaning here."""

    @typed("NameScope")
    def __init__(self, name: str) -> None:
        self._name = name

    def __enter__(self) -> None:
        return None

    def __exit__(self, *_: Any) -> None:
        return None


class MultiConv(torch.nn.Module):
    """Merges the convolutions of its scope: only the planner's business, so nothing happens here."""

    @typed("MultiConv")
    def __init__(self) -> None:
        super().__init__()

    @typed("MultiConv.availableMemoryProportions")
    def availableMemoryProportions(self, value: Union[float, List[float]]) -> "MultiConv":
        return self

    @typed("MultiConv.partialsTypes")
    def partialsTypes(self, value: Union[torch.dtype, List[torch.dtype]]) -> "MultiConv":
        return self

    @typed("MultiConv.enableConvDithering")
    def enableConvDithering(self, value: Union[bool, List[bool]]) -> "MultiConv":
        return self

    @typed("MultiConv.planType")
    def planType(self, value: "MultiConvPlanType") -> "MultiConv":
        return self

    @typed("MultiConv.perConvReservedTiles")
    def perConvReservedTiles(self, value: int) -> "MultiConv":
        return self

    @typed("MultiConv.cycleBackOff")
    def cycleBackOff(self, value: float) -> "MultiConv":
        assert 0 < value < 1, "Invalid cycle back off proportion"
        return self

    def __enter__(self) -> None:
        return None

    def __exit__(self, *_: Any) -> None:
        return None


class CPU:
    @typed("CPU", unchecked=["layer_to_call"])
    def __init__(self, layer_to_call: Callable[..., Any], ID: str) -> None:
        raise not_modelled("poptorch.CPU")


@typed("identity_loss", unchecked=["x", "reduction"])
def identity_loss(x: torch.Tensor, reduction: str) -> torch.Tensor:
    if not isinstance(x, torch.Tensor):
        raise py_error(f"identity_loss takes a tensor, not {type(x)}")
    if reduction not in ("sum", "mean", "none"):
        raise ValueError(f"Unsupported reduction type: {reduction}: it is sum, mean or none")
    loss = {"sum": torch.sum, "mean": torch.mean, "none": torch.clone}[reduction](x)
    if _trace.current is not None:
        _trace.current.mark_loss("identity_loss", loss)
    return loss


@typed("recomputationCheckpoint")
def recomputationCheckpoint(*tensors: List[torch.Tensor]) -> List[torch.Tensor]:
    assert all(isinstance(tensor, torch.Tensor) for tensor in tensors), "recomputationCheckpoint takes tensors"
    if _trace.current is not None:
        _trace.current.checkpoints += len(tensors)
    out = [tensor.view_as(tensor) for tensor in tensors]
    return out[0] if len(out) == 1 else tuple(out)


@typed("set_available_memory", unchecked=["tensor"])
def set_available_memory(tensor: torch.Tensor, available_memory_proportion: float) -> torch.Tensor:
    if not isinstance(tensor, torch.Tensor):
        raise py_error(f"You may only set available memory for torch.tensor values. {type(tensor)} is not supported.")
    assert 0 <= available_memory_proportion <= 1, "a share of the memory lies between 0 and 1"
    if _trace.current is not None:
        _trace.current.available_memory.append(available_memory_proportion)
    return tensor.view_as(tensor)


@typed("set_overlap_for_input")
def set_overlap_for_input(input_tensors, mode: "OverlapMode"):
    return _overlap(input_tensors, "set_overlap_for_input")


@typed("set_overlap_for_output")
def set_overlap_for_output(output_tensors, mode: "OverlapMode"):
    return _overlap(output_tensors, "set_overlap_for_output")


def _overlap(tensors: Any, what: str) -> Any:
    for tensor in _trace.flat(tensors):
        if not isinstance(tensor, torch.Tensor):
            raise py_error(f"You may only set overlap for torch.tensor inputs. {type(tensor)} is not supported.")
    if _trace.current is not None:
        _trace.current.overlapped.add(what)
    return _trace.mapped(tensors, lambda tensor: tensor.view_as(tensor))


@typed("serializedMatMul")
def serializedMatMul(
    lhs: torch.Tensor,
    rhs: torch.Tensor,
    mode: "MatMulSerializationMode",
    factor: int = 0,
    keep_precision: bool = False,
) -> torch.Tensor:
    return torch.matmul(lhs, rhs)


@typed("nop")
def nop(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view_as(tensor)


@typed("ipu_print_tensor")
def ipu_print_tensor(
    tensor: torch.Tensor,
    title: str = "",
    print_gradient: bool = True,
    summarise_threshold: int = 1000,
    edge_items: int = 3,
    max_line_width: int = 80,
    digits: int = 4,
    float_format: str = "auto",
    separator: str = ", ",
    open_bracket: str = "(",
    close_bracket: str = ")",
) -> torch.Tensor:
    return tensor.view_as(tensor)


Tensors = List[torch.Tensor]


@typed("for_loop")
def for_loop(count: int, body: Callable[[Tensors], Tensors], inputs: Tensors) -> Tensors:
    raise not_modelled("poptorch.for_loop")


@typed("cond")
def cond(
    condition: torch.Tensor,
    then_body: Callable[[Tensors], Tensors],
    then_inps: Tensors,
    else_body: Callable[[Tensors], Tensors],
    else_inps: Tensors,
) -> Tensors:
    raise not_modelled("poptorch.cond")


@typed("custom_op", unchecked=["inputs", "example_outputs"])
def custom_op(
    inputs: Tuple[torch.Tensor],
    name: str,
    domain: str,
    domain_version: int,
    example_outputs: Tuple[torch.Tensor],
    attributes: Optional[Dict[str, Union[float, int, str, list, tuple]]] = None,
) -> Tensors:
    raise not_modelled("poptorch.custom_op")


@typed("dynamic_slice")
def dynamic_slice(tensor: torch.Tensor, dim: int, start: torch.Tensor, size: int, step: int) -> torch.Tensor:
    raise not_modelled("poptorch.dynamic_slice")


@typed("dynamic_update")
def dynamic_update(input: torch.Tensor, src: torch.Tensor, dim: int, start: torch.Tensor, size: int) -> torch.Tensor:
    raise not_modelled("poptorch.dynamic_update")


@typed("ctc_beam_search_decoder")
def ctc_beam_search_decoder(
    probs: torch.Tensor, lengths: torch.Tensor, blank: int = 0, beam_width: int = 100, top_paths: int = 1
) -> Tensors:
    raise not_modelled("poptorch.ctc_beam_search_decoder")


@typed("fps")
def fps(src: torch.Tensor, ptr: List[int], ratio: float = 0.5, random_start: bool = False) -> torch.Tensor:
    raise not_modelled("poptorch.fps")


@typed("nearest")
def nearest(
    x: torch.Tensor,
    y: torch.Tensor,
    batch_x: Optional[Union[List[int], torch.Tensor]] = None,
    batch_y: Optional[Union[List[int], torch.Tensor]] = None,
):
    raise not_modelled("poptorch.nearest")
