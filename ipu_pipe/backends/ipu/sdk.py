"""Foresee what a pod's SDK would refuse once the job has waited for its IPUs: PopTorch when it
compiles, and Python 3.8 with torch 2.0.1 when they read the user's files.

    operation   of the model or the loss      has a handler in PopTorch, or is composed of such
    tensor      that an operation reads       is a parameter, a buffer, of the batch, or made there
    file        of the user's own classes     is Python 3.8, with names of torch 2.0.1

The lists, with their sources, are in `sdk.yaml`. Not run on hardware.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import inspect
import sys
from pathlib import Path
from typing import Any, Iterable, Iterator

import torch
from torch import nn

from ipu_pipe.backends.ipu.model_facts import LOSS, Observer, run_observed
from ipu_pipe.config.load import read_yaml
from ipu_pipe.cut.recording import name_operation
from ipu_pipe.job.record import Job
from ipu_pipe.model.batch import list_tensors
from ipu_pipe.model.frames import find_user_line, is_user_file
from ipu_pipe.model.meta import compute_on_meta
from ipu_pipe.model.observation import get_storage, join_name
from ipu_pipe.model.precision import get_user_loss
from ipu_pipe.model.watching import OperationWatch
from ipu_pipe.text import list_some

# arguments that PopTorch refuses (LossOps.cpp), or with which torch 2.0.1, unlike today's, takes an
# operation without a handler: the function, the argument's place and name, the operation
REFUSED_ARGUMENTS = (
    ("cross_entropy", 2, "weight", "nll_loss_nd"),
    ("nll_loss", 2, "weight", "nll_loss_nd"),
    ("cross_entropy", 7, "label_smoothing", "masked_select"),
    ("scaled_dot_product_attention", 5, "is_causal", "tril"),
)
# Python 3.8 cannot subscript these
BUILTINS = {"list", "dict", "tuple", "set", "frozenset", "type"}
REFUSED = "PopTorch 3.4 has no such operation and refuses it when it compiles: compose it of others"


@functools.lru_cache(maxsize=None)
def read_list(key: str) -> frozenset[str]:
    """Return the names of a list of `sdk.yaml`."""
    return frozenset(read_yaml(Path(__file__).with_name("sdk.yaml"))[key].split())


def predict_refusals(job: Job) -> list[str]:
    """Return what the SDK would refuse of a job, a line each."""
    observer = _OperationObserver(job)
    meta = job.example[0].is_meta
    with compute_on_meta() if meta else contextlib.nullcontext():
        run_observed(job, observer)
    faults = [
        ": ".join(filter(None, [place, list_some(list(dict.fromkeys(names)), 3), what]))
        # one line for a fault, whatever the number of modules that have it
        for (place, what), names in observer.faults.items()
    ]
    faults += [
        f"model: {name}: PopTorch has recurrent layers of one layer, in one direction, without "
        "dropout alone"
        for name, m in job.model.named_modules()
        if isinstance(m, nn.RNNBase) and (m.num_layers > 1 or m.bidirectional or m.dropout)
    ]
    users = [*map(type, job.model.modules()), get_user_loss(job.loss), type(job.data)]
    return faults + [fault for file in list_user_files(users) for fault in inspect_file(file)]


# ---- operations and tensors


class _OperationObserver(Observer):
    """Collect the operations of a forward that have no handler, and the tensors from outside.

    `faults`: (the part of a config, the fault) -> the modules that have it, or the tensor's name.
    """

    def __init__(self, job: Job) -> None:
        super().__init__(job)
        self.faults: dict[tuple[str, str], list[str]] = {}
        loss = get_user_loss(job.loss)
        modules = [m for m in (job.model, loss) if isinstance(m, nn.Module)]
        known = [t for m in modules for t in (*m.parameters(), *m.buffers())]
        # storages that the IPU has: others can only come from outside the graph
        self._known = {get_storage(t) for t in [*known, *list_tensors(job.example)]}
        self._attributes = {
            id(tensor): join_name(name, key)
            for one in modules
            for name, module in one.named_modules()
            for key, value in vars(module).items()
            if not key.startswith("_")
            for tensor in list_tensors(value)
        }

    def record_call(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Call a function of torch and return its result."""
        name = name_operation(func)
        for tensor in list_tensors((args, kwargs)):
            self._require_known(name, tensor)
        for function, place, key, operation in REFUSED_ARGUMENTS:
            # by its name or by its place
            value = kwargs.get(key, dict(enumerate(args)).get(place))
            if name == function and (isinstance(value, torch.Tensor) or value):
                self._note(f"{name} with {key} (aten::{operation})", REFUSED)
        # PopTorch takes such a function whole, whatever torch composes it of on a CPU
        if name in read_list("operations"):
            result = super().record_call(func, args, kwargs)
        else:
            with OperationWatch(functools.partial(self._examine, name)):
                result = super().record_call(func, args, kwargs)
        # results are made on the IPU
        self._known.update(map(get_storage, list_tensors(result)))
        return result

    def _examine(self, name: str, func: Any, args: Any, kwargs: Any) -> Any:
        """Run an operation of the function `name` and note it if PopTorch cannot."""
        operation = func._schema.name
        namespace, _, short = operation.partition("::")
        supported = read_list("operations") | read_list("composed")
        # PopTorch makes operations in place out of place
        if namespace != "aten" or not {short, short.rstrip("_")} & supported:
            self._note(f"{name} ({operation})", REFUSED)
        return func(*args, **kwargs)

    def _require_known(self, name: str, tensor: torch.Tensor) -> None:
        """Note a tensor that an IPU would not have."""
        storage = get_storage(tensor)
        if storage in self._known:
            return
        # once is enough
        self._known.add(storage)
        tensor_name = self._attributes.get(id(tensor), f"a tensor of shape {tuple(tensor.shape)}")
        why = "neither a parameter, a buffer nor an input: make it a buffer (register_buffer)"
        self._note(name, why, tensor_name)

    def _note(self, operation: str, why: str, subject: str = "") -> None:
        running = "" if self.running[-1] == LOSS else self.running[-1]
        line = find_user_line(run_observed.__name__)
        fault = f"{operation}{f' at {line}' if line else ''}: {why}"
        if subject and running:
            fault = f"read by {running}: {fault}"
        place = "model" if running else "loss"
        self.faults.setdefault((place, fault), []).append(subject or running)


# ---- files


def list_user_files(objects: Iterable[Any]) -> list[Path]:
    """Return the user's own files in which `objects` are defined, and those that these import."""
    files: dict[Path, None] = {}
    waiting = list(objects)
    while waiting:
        module = _find_module(waiting.pop())
        file = getattr(module, "__file__", None)
        if file and is_user_file(file) and Path(file) not in files:
            files[Path(file)] = None
            # what the module imports is among its names
            waiting += vars(module).values()
    return sorted(files)


def _find_module(value: Any) -> Any:
    """Return a module itself, or the module in which a class or a function is defined."""
    if inspect.ismodule(value):
        return value
    value = value if inspect.isclass(value) or inspect.isroutine(value) else type(value)
    return sys.modules.get(getattr(value, "__module__", None) or "")


def inspect_file(file: Path) -> list[str]:
    """Return what Python 3.8 and torch 2.0.1 would refuse of a file, a line each."""
    try:
        tree = ast.parse(file.read_text(encoding="utf-8"), feature_version=(3, 8))
    except SyntaxError as error:
        return [f"{file}:{error.lineno}: {error.msg}: the SDK has Python 3.8"]
    # a branch may ask for the version that it runs on
    branches = [node for node in ast.walk(tree) if isinstance(node, (ast.If, ast.Try))]
    guarded = {id(node) for branch in branches for node in ast.walk(branch)}
    newer = {
        f"{file}:{node.lineno}: {name}: the SDK has torch 2.0.1, which lacks it"
        for name, node in _iterate_names(tree)
        if name in read_list("lacks") and id(node) not in guarded
    }
    types = {
        f"{file}:{node.lineno}: list[X] or X | Y in an annotation: Python 3.8, which the SDK has, "
        "cannot evaluate it: begin the file with from __future__ import annotations"
        for node in _iterate_new_types(tree)
    }
    return [*sorted(newer), *sorted(types)]


def _iterate_names(tree: ast.AST) -> Iterator[tuple[str, Any]]:
    """Yield the full names of what a file imports and of the attributes that it reads there."""
    full_names: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            module = getattr(node, "module", None) or ""
            yield module, node
            for alias in node.names:
                name = f"{module}.{alias.name}".lstrip(".")
                full_names[alias.asname or alias.name] = name
                yield name, node
    # a second walk, because a name may be used above its import in the file
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            head, _, rest = _join_attributes(node).partition(".")
            yield f"{full_names.get(head, head)}.{rest}", node


def _join_attributes(node: ast.AST) -> str:
    if isinstance(node, ast.Attribute):
        return f"{_join_attributes(node.value)}.{node.attr}"
    return getattr(node, "id", "")


def _iterate_new_types(tree: ast.Module) -> Iterator[Any]:
    """Yield the parts of annotations that Python 3.8 would evaluate and cannot."""
    if any(getattr(node, "module", "") == "__future__" for node in tree.body):
        return
    for owner in ast.walk(tree):
        for key in ("annotation", "returns"):
            for node in ast.walk(getattr(owner, key, None) or ast.Pass()):
                is_builtin = getattr(getattr(node, "value", None), "id", "") in BUILTINS
                if is_builtin or isinstance(getattr(node, "op", None), ast.BitOr):
                    yield node
