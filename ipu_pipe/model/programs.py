"""What a piece of a model does: the calls of one stage of a recording, made on a model's own modules."""

from __future__ import annotations

import contextlib
from typing import Any, Callable, Dict, List, NamedTuple, Tuple

import torch
from torch import nn

from ipu_pipe.model.recorded import State
from ipu_pipe.model.staging import Part
from ipu_pipe.model.templates import Getter, Key, Value, Weight, keys_in, leaves_of, maker


class _Step(NamedTuple):
    """A call to make; `gives`: places of those of its results that are needed; `done`: places of what no later step needs."""

    function: Callable[..., Any]
    args: Getter
    keywords: Getter
    gives: List[Tuple[int, int]]
    done: List[int]


class Program:
    """The steps of one stage of one recording, on a model's modules; `compiles`: by torch.compile, a module each."""

    def __init__(self, model: nn.Module, part: Part, base: State, compiles: bool = False) -> None:
        self._model, self._part, self._base = model, part, base
        self._places: Dict[Key, int] = {}  # of values, in the order in which they come
        self._enters = [self._place(key) for key in part.enters]
        self._copied = [self._places[key] for key in part.copied]
        self._given: List[Tuple[int, int]] = []  # of the model's input
        used = {key for node in part.nodes for key in node.needs()} | set(keys_in(part.leaves))
        wanted: Dict[int, List[Value]] = {}
        for key in used:
            if isinstance(key, Value) and key not in self._places:
                wanted.setdefault(key.node, []).append(key)
                self._place(key)
        done = self._last_uses(part)
        self._runs: List[Tuple[State, List[_Step]]] = []
        for node in part.nodes:
            gives = [(key.leaf, self._places[key]) for key in wanted.get(node.index, ())]
            if node.target is None:
                self._given = gives
                continue
            if not self._runs or self._runs[-1][0] != node.state:
                self._runs.append((node.state, []))
            function = model.get_submodule(node.target) if isinstance(node.target, str) else node.target
            if compiles and isinstance(node.target, str):
                # dropout draws the numbers that it draws uncompiled
                function = torch.compile(function, options={"fallback_random": True})  # type: ignore[arg-type]
            args, keywords = maker(node.args, self._getter), maker(node.keywords, self._getter)
            self._runs[-1][1].append(_Step(function, args, keywords, gives, done.get(node.index, [])))
        self._leaves = maker(part.leaves, self._apart)

    def _place(self, key: Key) -> int:
        return self._places.setdefault(key, len(self._places))

    def _last_uses(self, part: Part) -> Dict[int, List[int]]:
        """Node -> places of what is not needed after it."""
        last = {key: node.index for node in part.nodes for key in node.needs() if key in self._places}
        kept, done = set(keys_in(part.leaves)), {}  # type: ignore[var-annotated]
        for key, index in last.items():
            if key not in kept:
                done.setdefault(index, []).append(self._places[key])
        return done

    def _getter(self, key: Key) -> Getter:
        if key in self._places:
            place = self._places[key]
            return lambda values: values[place]
        assert isinstance(key, Weight), key
        path, _, name = key.name.rpartition(".")
        owner = self._model.get_submodule(path)
        return lambda values: getattr(owner, name)

    def _apart(self, key: Key) -> Getter:
        """What is handed on. Of a weight a copy: it may be updated before it is through."""
        get = self._getter(key)
        return get if key in self._places else lambda values: get(values).clone()

    def run(self, value: Any) -> Any:
        """What the next piece takes, or the model's output."""
        values: List[Any] = [None] * len(self._places)
        for place, tensor in zip(self._enters, value if len(self._enters) > 1 else (value,)):
            values[place] = tensor
        for place in self._copied:
            values[place] = values[place].clone()
        if self._given:
            leaves = leaves_of(value)
            for leaf, place in self._given:
                values[place] = leaves[leaf]
        for state, steps in self._runs:
            with self._as_recorded(state):
                for function, args, keywords, gives, done in steps:
                    result = function(*args(values), **keywords(values))
                    if gives:
                        leaves = (result,) if isinstance(result, torch.Tensor) else leaves_of(result)
                        for leaf, place in gives:
                            values[place] = leaves[leaf]
                    for place in done:
                        values[place] = None
                result, leaves = None, ()
        return self._leaves(values)

    def _as_recorded(self, state: State) -> Any:
        """Grad mode and autocast as the model's forward sets them."""
        if state == self._base:
            return contextlib.nullcontext()
        stack = contextlib.ExitStack()
        if state.grad != self._base.grad:
            stack.enter_context(torch.set_grad_enabled(state.grad))
        for device, on, dtype in state.autocast:
            if device == "cpu" or torch.cuda.is_available():
                stack.enter_context(torch.autocast(device, dtype=dtype, enabled=on))
        return stack
