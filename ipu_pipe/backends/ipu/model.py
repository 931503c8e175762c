"""A job's model, loss and optimizer in the form that PopTorch compiles; what the rules of ipu_options need to know of them.

    forward(x, y)   body(x) -> outputs -> losses, all inside, so that the whole is one graph
                    -> final loss, loss of each block (P,), right and counted labels of each block (P, 2)
    forward(x)      -> outputs, for evaluation

Blocks with losses of their own (local-parallel training) in one graph: their boundaries are detached and their losses summed,
so that each block's gradient is its own loss's alone. A loss is computed where its block is, before the next one begins:

    IPU 0: block 0, head 0, loss 0 | IPU 1: block 1, head 1, loss 1 | IPU 2: block 2, loss 2, sum
"""

from __future__ import annotations

import copy
from typing import Any, Dict, Iterator, List, Mapping, Optional, Sequence, Set, Tuple

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten, tree_map
from torch.utils.data import Dataset

from ipu_pipe.backends.interface import MARK
from ipu_pipe.backends.ipu.options import ACCUMULATORS, OVERLAP, IpuConfig, ModelFacts, stage_name
from ipu_pipe.data import DataSource
from ipu_pipe.errors import BadInput
from ipu_pipe.job.config import Config
from ipu_pipe.job.evaluation import right_answers
from ipu_pipe.local.blocks import HEADS, SumOfLosses, blocks_of, one_activation
from ipu_pipe.model.buffers import buffers_restored
from ipu_pipe.model.cutting import Piece
from ipu_pipe.model.probe import Loss
from ipu_pipe.model.stages import Partition

# ---- the module that is wrapped


class Whole(nn.Module):
    """A copy of a model with one loss."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = copy.deepcopy(model)

    def walk(self, x: torch.Tensor) -> Iterator[Tuple[Any, Any]]:
        """The model's output, and nothing to hand on."""
        yield self.model(x), None


class LocalBlocks(nn.Module):
    """Copies of a model's blocks with losses of their own, in one graph: all of them, or some from number `first` on."""

    def __init__(self, model: nn.Module, heads: nn.ModuleDict, cut: Sequence[Piece], first: int = 0) -> None:
        super().__init__()
        self.model, self.heads = model, heads
        self._pieces = tuple(recut(piece, model) for piece in cut)  # no children: their modules are the model's
        self._first = first
        last = len(cut) - 1
        self.losses = sum(i == last or str(first + i) in heads for i in range(len(cut)))

    def __deepcopy__(self, memo: Dict[int, Any]) -> "LocalBlocks":
        model, heads = copy.deepcopy(self.model, memo), copy.deepcopy(self.heads, memo)
        memo[id(self)] = made = LocalBlocks(model, heads, self._pieces, self._first)
        made.training = self.training
        return made

    def walk(self, x: torch.Tensor) -> Iterator[Tuple[Any, Any]]:
        """(outputs, activations handed on without a gradient) of each block that has a loss, the model's own last; what asks for
        the next one runs it."""
        value: Any = x
        for index, piece in enumerate(self._pieces, self._first):
            value = piece(value)
            onward = tree_map(torch.Tensor.detach, value)
            if str(index) in self.heads:
                yield self.heads[str(index)](one_activation(value)), onward
            elif piece is self._pieces[-1]:
                yield value, onward
            value = onward


def skeleton(piece: Piece) -> nn.Module:
    """A module that holds copies of one piece's modules and weights, and no others, under the model's names."""
    root, memo = nn.Module(), {}  # type: ignore[var-annotated]
    for name, link in zip(piece.names, piece.links):
        owner, _, last = name.rpartition(".")
        _grown(root, owner)._modules[last] = copy.deepcopy(link, memo)
    for name in piece._own:
        owner, _, last = name.rpartition(".")
        tensor = getattr(piece._whole[0].get_submodule(owner), last)
        kind = "_parameters" if isinstance(tensor, nn.Parameter) else "_buffers"
        getattr(_grown(root, owner), kind)[last] = copy.deepcopy(tensor, memo)
    return root


def _grown(root: nn.Module, path: str) -> nn.Module:
    """The module at `path`, made where there is none."""
    for part in filter(None, path.split(".")):
        root._modules.setdefault(part, nn.Module())
        root = root._modules[part]  # type: ignore[assignment]
    return root


def recut(piece: Piece, model: nn.Module) -> Piece:
    """The same piece of a copy of its model."""
    made = Piece(model, piece._nodes, piece._enters, piece._leaves)
    made.begins_in_place = piece.begins_in_place
    return made


class Wrapped(nn.Module):
    """What PopTorch compiles. `narrow`: outputs are half precision; losses are taken in float32. `overlap`: of the input with
    computing, PopTorch's name of the mode. `hands_on`: gives the activations for the next block, too."""

    def __init__(
        self,
        body: nn.Module,
        loss: Loss,
        narrow: bool = False,
        overlap: Optional[str] = None,
        hands_on: bool = False,
    ) -> None:
        super().__init__()
        each = loss.each if isinstance(loss, SumOfLosses) else loss
        self.body = body
        # one for each block: a tensor of the loss's own cannot be on two IPUs
        copies = getattr(body, "losses", 1)
        self.loss: Any = [each] * copies
        if isinstance(each, nn.Module):
            self.loss = nn.ModuleList([copy.deepcopy(each) for _ in range(copies)])
        self._narrow, self._overlap, self._hands_on = narrow, overlap, hands_on

    def forward(self, x: torch.Tensor, y: Optional[torch.Tensor] = None) -> Any:
        """x: a microbatch, y: its labels in training. See above for what it gives."""
        import poptorch

        poptorch.Block.start(stage_name(0))  # what comes before the first boundary would belong to no listed block
        if self._overlap is not None:
            x = poptorch.set_overlap_for_input(x, getattr(poptorch.OverlapMode, self._overlap))
        found, handed = [], ()
        for loss, (output, onward) in zip(self.loss, self.body.walk(x)):  # type: ignore[operator]
            found.append(output if y is None else self._judge(loss, output, y))
            handed = (onward,) if self._hands_on else ()  # type: ignore[assignment]
        return (*found, *handed) if y is None else (*self._together(found), *handed)

    def _together(self, found: Sequence[Tuple[torch.Tensor, Optional[torch.Tensor]]]) -> Sequence[torch.Tensor]:
        """The final loss, the losses, the right answers where they have a meaning."""
        import poptorch

        losses = [loss for loss, _ in found]
        total = losses[0]
        for loss in losses[1:]:
            total = total + loss
        given = (poptorch.identity_loss(total, "none"), torch.stack([loss.detach().reshape(()) for loss in losses]))
        answers = [right for _, right in found if right is not None]
        return (*given, torch.stack(answers)) if len(answers) == len(found) else given

    def _judge(self, each: Loss, output: Any, y: torch.Tensor) -> Tuple[torch.Tensor, Optional[torch.Tensor]]:
        """Loss and right answers of one block's outputs."""
        if self._narrow:
            output = tree_map(lambda t: t.float() if t.is_floating_point() else t, output)
        return each(output, y), right_answers(output, y)


_PREFIXES = (("body.model.", ""), ("body.heads.", f"{HEADS}."))


def unsplit(name: str) -> Optional[str]:
    """The name in the user's model of a tensor of Wrapped; None for the loss's own."""
    for prefix, own in _PREFIXES:
        if name.startswith(prefix):
            return own + name[len(prefix) :]
    return None


def wrap(model: nn.Module, loss: Loss, part: Partition, precision: str, ipu: IpuConfig) -> Wrapped:
    """A copy of the model as PopTorch wants it, its stages marked. The user's own stays as it is."""
    import poptorch

    blocks = blocks_of(model)
    if blocks is None:
        body: nn.Module = Whole(model)
    else:
        body = LocalBlocks(copy.deepcopy(blocks.model), copy.deepcopy(blocks.heads), blocks.pieces)
    if precision == "16.16":
        body.half()
    for name, stage in part.begins.items():
        poptorch.BeginBlock(body.model.get_submodule(name), stage_name(stage))  # type: ignore[operator,union-attr]
    narrow, overlap = precision.startswith("16"), OVERLAP.get(ipu.overlapped_io)
    return Wrapped(body, loss, narrow, overlap).train()


def wrap_block(model: nn.Module, loss: Loss, index: int, precision: str, ipu: IpuConfig) -> Wrapped:
    """A copy of one block with a loss of its own, for an IPU of its own; it hands its activations on unless it is "
    "the last."""
    blocks = blocks_of(model)
    assert blocks is not None
    piece, head = blocks.pieces[index], blocks.head(index)
    heads = nn.ModuleDict({} if head is None else {str(index): copy.deepcopy(head)})
    body = LocalBlocks(skeleton(piece), heads, [piece], index)
    if precision == "16.16":
        body.half()
    hands_on = index < len(blocks.pieces) - 1
    return Wrapped(body, loss, precision.startswith("16"), OVERLAP.get(ipu.overlapped_io), hands_on).train()


def as_input(value: torch.Tensor, precision: str) -> torch.Tensor:
    """A tensor of a microbatch in the precision of the IPU's inputs."""
    if not value.is_floating_point():
        return value
    return value.half() if precision.startswith("16") else value.float()


def as_label(value: torch.Tensor) -> torch.Tensor:
    """Labels of a microbatch: losses are taken in float32 whatever the inputs' precision."""
    return value.float() if value.is_floating_point() else value


# ---- its inputs


class Calls(Dataset):  # type: ignore[type-arg]
    """Inputs of PopTorch's calls in order, item i the one of updates first + i D and on: samples of D updates, of their
    microbatches, of the replicas from `replica` on. It can go to another process."""

    def __init__(
        self, data: DataSource, config: Config, updates_per_epoch: int, first: int, updates: int, replica: int, replicas: int
    ) -> None:  # fmt: skip
        assert config.backend.ipu is not None
        self._data, self._config, self._per_epoch = data, config, updates_per_epoch
        self._first, self._iterations = first, config.backend.ipu.device_iterations
        self._count = max(updates - first, 0) // self._iterations
        self._replicas = range(replica, replica + replicas)

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> Tuple[torch.Tensor, torch.Tensor]:
        if not 0 <= index < self._count:
            raise IndexError(index)
        config = self._config
        accumulate = config.gradient_accumulation
        begin = (self._first + index * self._iterations) * accumulate
        found = [
            self._microbatch(m, replica)
            for m in range(begin, begin + self._iterations * accumulate)
            for replica in self._replicas
        ]
        return torch.cat([as_input(x, config.precision) for x, _ in found]), torch.cat([as_label(y) for _, y in found])

    def _microbatch(self, m: int, replica: int) -> Tuple[torch.Tensor, torch.Tensor]:
        config = self._config
        epoch, within = divmod(m, self._per_epoch * config.gradient_accumulation)
        return self._data.train_batch(epoch, within * config.replicas + replica, config.micro_batch_size)


# ---- its optimizer

_SETTINGS = {
    "SGD": ("lr", "momentum", "dampening", "weight_decay"),
    "Adam": ("lr", "betas", "eps", "weight_decay"),
    "AdamW": ("lr", "betas", "eps", "weight_decay"),
    "RMSprop": ("lr", "alpha", "eps", "weight_decay", "momentum"),
}


def translate(
    optimizer: torch.optim.Optimizer,
    names: Mapping[Any, str],
    own: Mapping[str, nn.Parameter],
    ipu: IpuConfig,
    clip_norm: Optional[float] = None,
) -> Any:
    """The poptorch.optim optimizer that does what torch.optim's does. `names`: of its parameters; `own`: those on the IPU by the
    same names, others are left out. Of its settings the rate alone may change later: the others are constants of the graph."""
    import poptorch

    kind = type(optimizer).__name__
    groups: List[Dict[str, Any]] = []
    for group in optimizer.param_groups:
        chosen = [own[names[p]] for p in group["params"] if p in names and names[p] in own]
        if chosen:
            groups.append({"params": chosen, "stage": group["stage"], **_settings(kind, group)})
    if not groups:
        raise BadInput("model: it has no parameter that needs a gradient here: nothing to train")
    given: Dict[str, Any] = {key: value for key, value in groups[0].items() if key not in ("params", "stage")}
    if kind == "RMSprop":
        given["centered"] = bool(optimizer.param_groups[0]["centered"])
    constant = [key for key in given if key not in ("lr", "centered")]
    if ipu.loss_scaling != 1.0:
        given["loss_scaling"] = ipu.loss_scaling
    if ipu.use_combined_accum:
        given["use_combined_accum"] = True
        if ipu.loss_scaling != 1.0:
            given["velocity_scaling"] = ipu.loss_scaling  # PopTorch copies it for the separate variant alone
    for key in ACCUMULATORS[kind]:
        if getattr(ipu, key) == "float16":
            given[key] = torch.float16
    if clip_norm is not None:
        given["max_grad_norm"] = float(clip_norm)
    made = getattr(poptorch.optim, kind)(groups, **given)
    for key in constant:
        made.variable_attrs.markAsConstant(key)
    return made


def set_rates(optimizer: Any, rates: Any) -> bool:
    """Set every group's rate to its stage's of `rates` (P,); whether any changed."""
    changed = False
    for group in optimizer.param_groups:
        rate = float(rates[group["stage"]])
        changed = changed or group["lr"] != rate
        group["lr"] = rate
    return changed


def _settings(kind: str, group: Mapping[str, Any]) -> Dict[str, Any]:
    found: Dict[str, Any] = {}
    for key in _SETTINGS[kind]:
        value = group[key]
        found[key] = tuple(float(one) for one in value) if key == "betas" else float(value)
    return found


# ---- its optimizer's state in checkpoints

SECTIONS = ("ipu_state", "ipu_param")


def read_state(optimizer: Any) -> Optional[Dict[str, Dict[str, Any]]]:
    """Copies of what a PopTorch optimizer holds, by PopTorch's names; None where it keeps nothing from update to update."""
    held = optimizer.state_dict()
    found = {
        section: {key: _copied(value) for key, value in (held.get(section) or {}).items() if value is not None}
        for section in SECTIONS
    }
    return found if found["ipu_state"] else None


def _copied(value: Any) -> Any:
    return value.detach().cpu().clone() if isinstance(value, torch.Tensor) else value


def export_state(held: Mapping[str, Any], names: Sequence[str]) -> Tuple[Dict[str, torch.Tensor], Dict[str, Any]]:
    """(tensors, plain values) of a PopTorch optimizer's state dict for a checkpoint, `parameter/poptorch:section:key`. PopTorch's
    keys stay as they are; an entry lies with the parameter whose name its key ends in, else with the first."""
    tensors: Dict[str, torch.Tensor] = {}
    plain: Dict[str, Any] = {}
    longest = sorted(names, key=len, reverse=True)
    for section in SECTIONS:
        for key, value in (held.get(section) or {}).items():
            owner = next((name for name in longest if key.endswith(name)), names[0])
            place = f"{owner}/{MARK}:{section}:{key.replace('/', '|')}"
            if isinstance(value, torch.Tensor):
                tensors[place] = value
            else:
                plain[place] = list(value) if isinstance(value, tuple) else value
    return tensors, plain


def import_state(optimizer: torch.optim.Optimizer) -> Optional[Dict[str, Dict[str, Any]]]:
    """What a checkpoint put into the job's optimizer, as PopTorch's own; None where there is none. Raises BadInput for the state
    of torch's own optimizers, which PopTorch does not read."""
    found: Dict[str, Dict[str, Any]] = {section: {} for section in SECTIONS}
    foreign = False
    for state in optimizer.state.values():
        for entry, value in state.items():
            mark, _, rest = str(entry).partition(":")
            if mark == MARK:
                section, _, key = rest.partition(":")
                found[section][key.replace("|", "/")] = tuple(value) if isinstance(value, list) else value
            else:
                foreign = foreign or value is not None
    if foreign:
        raise BadInput(
            "--resume: the checkpoint's optimizer state is torch.optim's, of which PopTorch can load none: go on with "
            "the backend "
            "that wrote it, or start anew from its weights (init_from: .../model.safetensors)"
        )
    return found if found["ipu_state"] else None


def state_bytes(tensors: Mapping[str, torch.Tensor], part: Partition) -> List[int]:
    """Bytes of optimizer state by stage, from `export_state`'s tensors."""
    held, stage_of = [0] * len(part), part.stage_of()
    for place, value in tensors.items():
        name = place.rpartition("/")[0]
        if name in stage_of and f"{MARK}:ipu_state:" in place:
            held[stage_of[name]] += value.numel() * value.element_size()
    return held


# ---- what the rules need to know


class _Uses(TorchFunctionMode):
    """Sees at which stage each weight and buffer is used."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.stage = 0
        self.stages: Dict[str, Set[int]] = {}
        self._names = {id(t): name for name, t in [*model.named_parameters(), *model.named_buffers()]}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for tensor in tree_flatten((args, kwargs or {}))[0]:
            if isinstance(tensor, torch.Tensor) and id(tensor) in self._names:
                self.stages.setdefault(self._names[id(tensor)], set()).add(self.stage)
        return func(*args, **(kwargs or {}))


def facts(
    model: nn.Module,
    part: Partition,
    x: torch.Tensor,
    optimizer: torch.optim.Optimizer,
    updates: int,
    updates_per_epoch: int,
) -> ModelFacts:
    """What one training forward of a microbatch `x` on the CPU shows."""
    uses, order, handles = _Uses(model), [], []
    for name, stage in part.begins.items():

        def enter(module: nn.Module, inputs: Any, stage: int = stage) -> None:
            uses.stage = stage
            order.append(stage)

        handles.append(model.get_submodule(name).register_forward_pre_hook(enter))
    before = {name: (t, t.clone()) for name, t in model.named_buffers()}
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=[]), buffers_restored(model):
            with uses:
                model(x.clone())
            now = dict(model.named_buffers())
            moving = [name for name, (t, old) in before.items() if now[name] is not t or not torch.equal(t, old)]
    finally:
        for handle in handles:
            handle.remove()
    kind = type(optimizer)
    plain = kind.__name__ if kind.__module__.startswith("torch.optim") else f"{kind.__module__}.{kind.__name__}"
    return ModelFacts(
        stages=len(part),
        shared={name: sorted(stages) for name, stages in uses.stages.items() if len(stages) > 1},
        order=order,
        empty=sorted(set(range(1, len(part))) - set(part.begins.values())),
        moving=moving,
        optimizer=(plain, optimizer.param_groups),
        updates=updates,
        updates_per_epoch=updates_per_epoch,
    )
