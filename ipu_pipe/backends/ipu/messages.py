"""Activations and results between the processes of blocks, through the hosts' memory (gloo)."""

from __future__ import annotations

from collections import deque
from typing import Any, Deque, Tuple

import torch
import torch.distributed as dist


class Messages:
    """What rank `rank` receives from the one before and sends on; at most `outstanding` on their way, so that memory is bounded.
    `sent`: bytes and messages of activations in training. `half`: they are half precision."""

    def __init__(self, rank: int, outstanding: int, half: bool) -> None:
        self._rank, self._outstanding = rank, outstanding
        self._dtype = torch.float16 if half else torch.float32
        self._sending: Deque[Tuple[Any, torch.Tensor]] = deque()
        self.sent = [0, 0]

    def receive(self, shape: Tuple[int, ...], tag: int) -> torch.Tensor:
        """Activations of the block before."""
        held = torch.empty(shape, dtype=self._dtype)
        dist.recv(held, self._rank - 1, tag=tag)
        return held

    def send(self, tensor: torch.Tensor, tag: int) -> None:
        """Activations to the next block."""
        self.post(tensor.to(self._dtype).contiguous(), self._rank + 1, tag)

    def post(self, tensor: torch.Tensor, target: int, tag: int) -> None:
        """Send without waiting, unless too many are on their way."""
        self._sending.append((dist.isend(tensor, target, tag=tag), tensor))
        while len(self._sending) > self._outstanding:
            self._sending.popleft()[0].wait()

    def flush(self) -> None:
        """Wait until all is received."""
        while self._sending:
            self._sending.popleft()[0].wait()
