"""Microbatches whose inputs are of another kind than the first one's: other lengths or dtypes, or a
mask that is sometimes None.

Only the first stage sees the inputs, and receives for the usual tensors are posted ahead. So a
message of another kind takes their place first:

    stage s, F5                                        stage s + 1
    [1] a notice in the place of the usual tensors --> reads the notice in the buffers that were posted
    [2] the inputs, once on each link             --> records and verifies their forward, as at the start
    [3] the tensors                               --> posts receives of the recorded shapes
    <-- backward: zeros in the place of the usual gradients, then the gradients

The usual message costs nothing more. A message of another kind costs the bytes of a usual one more.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import io
import struct
from typing import Any, Callable, ContextManager, Mapping, NamedTuple, Sequence

import torch

from ipu_pipe.cut.crossing import Crossing, TensorSpec
from ipu_pipe.cut.cutting import Piece, make_key
from ipu_pipe.cut.verification import TrainingEffects, verify_pieces
from ipu_pipe.errors import BadInput
from ipu_pipe.model.batch import clone_tensors, describe_tensors, sort_keys
from ipu_pipe.refusals import BATCH, EMULATOR
from ipu_pipe.schedule.actions import Kind
from ipu_pipe.text import list_some

# no tensor begins with these 128 bits by chance
MAGIC = hashlib.sha256(b"ipu_pipe: inputs of another kind").digest()[:16]
# what follows them: the number of the kind, and the bytes of the inputs if they follow
NOTICE = struct.Struct("<16sii")


class Notice(NamedTuple):
    """A notice of stage s to s + 1. `size`: the bytes of the inputs, 0 if they were sent before."""

    number: int
    size: int


class InputKinds:
    """The kinds of inputs of training microbatches, by number; 0 is the first microbatch's.

    `crossings`: number -> the tensors that cross each cut. `of_microbatch`: microbatch in flight ->
    number, if it is not 0. `draws`: the modules that draw random numbers. `list_entries`: returns
    what each stage receives. `check`: raises `BadInput` if ranks cannot share a forward's effects.
    `is_fixed`: messages cannot be replaced, as those of nccl or of sharded weights. `fill`: a context in which the weights
    of other ranks, which are freed, have numbers.
    """

    def __init__(
        self,
        pieces: Sequence[Piece],
        example: Any,
        crossings: Sequence[Crossing],
        draws: Mapping[str, int],
        list_entries: Callable[[Sequence[Crossing]], list[Crossing | None]],
        check: Callable[[TrainingEffects], None],
        is_fixed: bool,
    ) -> None:
        self.crossings: dict[int, Sequence[Crossing]] = {0: crossings}
        self.of_microbatch: dict[int, int] = {}
        self.fill: Callable[[], ContextManager[None]] = contextlib.nullcontext
        self._pieces = pieces
        self._draws = draws
        self._list_entries = list_entries
        # kept for `use`: a recorded forward is found by its inputs
        self._inputs: dict[int, Any] = {0: example}
        self._numbers = {make_key(example, training=True): 0}
        # (number, target stage) of inputs that were sent
        self._announced: set[tuple[int, int]] = set()
        self._runs = pieces[0].cut.count_runs(draws)
        self._check = check
        # a notice must fit into a tensor of every message
        self.is_fixed = is_fixed or not all(
            any(t.bytes >= NOTICE.size for t in crossing.tensors) for crossing in crossings
        )

    # ---- the kind of a microbatch

    def note(self, m: int, x: Any) -> None:
        """Note the kind of the inputs of microbatch m. Raise `BadInput` if it is new and cannot be
        trained.
        """
        key = make_key(x, training=True)
        if key not in self._numbers:
            if self.is_fixed:
                raise BadInput(
                    f"{BATCH}: microbatch {m}: inputs: {describe_tensors(x)}, of the first "
                    f"microbatch {describe_tensors(self._inputs[0])}: these messages (nccl, of "
                    f"sharded weights, or of less than {NOTICE.size} bytes) have one shape: pad, or use {EMULATOR}"
                )
            self._learn(len(self.crossings), x)
        if self._numbers[key]:
            self.of_microbatch[m] = self._numbers[key]

    def _learn(self, number: int, x: Any) -> None:
        """Record and verify the forward of inputs of a new kind."""
        cut = self._pieces[0].cut
        with self.fill():
            effects = verify_pieces(cut.model, self._pieces, x, modes=(True,))
            self._check(effects)
            crossings = cut.prepare(x, training=True)
        # the draws of a microbatch are keyed by module and call, as counted in the first forward
        if effects.forward.draws.keys() - self._draws.keys() or (
            cut.count_runs(self._draws) != self._runs
        ):
            raise BadInput(
                f"{BATCH}: inputs: {describe_tensors(x)}: their forward runs modules that "
                f"draw random numbers ({list_some([*self._draws, *effects.forward.draws])}) not as "
                f"often as the first microbatch's: pad, or use {EMULATOR}"
            )
        self.crossings[number] = crossings
        self._inputs[number] = clone_tensors(x)
        self._numbers[make_key(x, training=True)] = number

    def use(self, m: int) -> None:
        """Let the pieces run the recorded forward of microbatch m's kind. Only the first stage could
        tell it from the tensors that it gets.
        """
        # with one kind the pieces run the first recorded forward anyway
        if len(self.crossings) > 1:
            x = self._inputs[self.of_microbatch.get(m, 0)]
            self._pieces[0].cut.prepare(x, training=True)

    def forget(self, end: int | None = None) -> None:
        """Forget the kinds of the microbatches before `end`, of all if None: they are done."""
        for m in [m for m in self.of_microbatch if end is None or m < end]:
            del self.of_microbatch[m]

    # ---- messages

    def find_shapes(self, kind: str, target: int, number: int) -> tuple[TensorSpec, ...]:
        """Return the shapes of the tensors of a message of this kind of pass and of inputs."""
        crossings = self.crossings[number]
        # gradients cross the same cut, those of tensors that have one
        if kind == Kind.BACKWARD.value:
            return tuple(t.gradient for t in crossings[target].tensors if t.differentiable)
        entering = self._list_entries(crossings)[target]
        return () if entering is None else entering.tensors

    def list_placeholders(self, kind: str, m: int, target: int) -> list[torch.Tensor]:
        """Return the tensors that come before those of microbatch m in a message: [1] and [2]."""
        number = self.of_microbatch.get(m, 0)
        if not number:
            return []
        shapes = self.find_shapes(kind, target, 0)
        # on the host: where messages stay on a GPU, kinds are fixed
        usual = [torch.zeros(spec.message_shape, dtype=spec.dtype) for spec in shapes]
        # the receiver of a backward or a recomputation knows the kind from its own forward
        if kind != Kind.FORWARD.value:
            return usual
        # once on each link: the receiver keeps what it has learned
        inputs = b""
        if (number, target) not in self._announced:
            self._announced.add((number, target))
            inputs = _dump(self._inputs[number])
        notice = NOTICE.pack(MAGIC, number, len(inputs))
        # over the zeros of the placeholder, as raw bytes whatever its dtype
        buffer = _select_buffer(usual).view(-1).view(torch.uint8)
        buffer[: NOTICE.size] = _to_tensor(notice)
        return [*usual, _to_tensor(inputs)] if inputs else usual

    def read_notice(self, m: int, usual: Sequence[torch.Tensor]) -> Notice | None:
        """Return the notice in the buffers of usual tensors, None if these are the tensors."""
        # not a tensor operation, which would take ten times as long for each message
        content = ctypes.string_at(_select_buffer(usual).data_ptr(), len(MAGIC))
        if content != MAGIC:
            return None
        # the whole notice is read only if it is one: the usual message costs one comparison
        content = ctypes.string_at(_select_buffer(usual).data_ptr(), NOTICE.size)
        notice = Notice(*NOTICE.unpack(content)[1:])
        self.of_microbatch[m] = notice.number
        return notice

    def learn(self, number: int, inputs: torch.Tensor, device: torch.device) -> None:
        """Record the forward of inputs that another rank has sent."""
        # a rank with several stages hears of a kind on several links
        if number not in self.crossings:
            content = io.BytesIO(inputs.numpy().tobytes())
            # from a rank of this run, and perhaps nests of the user's own classes, so not
            # weights_only
            self._learn(number, torch.load(content, map_location=device, weights_only=False))


def _select_buffer(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the first tensor of a message that a notice fits into."""
    return next(t for t in tensors if t.numel() * t.element_size() >= NOTICE.size)


def _dump(x: Any) -> bytes:
    content = io.BytesIO()
    torch.save(sort_keys(x), content)
    return content.getvalue()


def _to_tensor(content: bytes) -> torch.Tensor:
    # a bytearray, because torch warns of memory that cannot be written
    return torch.frombuffer(bytearray(content), dtype=torch.uint8)
