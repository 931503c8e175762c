"""Simulate torch.distributed in one process: ranks are threads of which one runs at a time, and a seed decides the order.

    rank 0   F0 isend | F1 isend | wait .............. B0      the clock is virtual: it jumps to the next event
    rank 1   ....... wait | F0 .. isend | wait ....... B0      at every call a rank may be delayed
    events   -------x--------x-----------x------->  deliveries, resumptions, timeouts, by time

Messages of gloo are matched by source, target and tag. Those of a channel (nccl) are matched by source and target, and its
first use blocks a rank until the other uses it, too. A message is in flight once both sides have posted it, and arrives after a
random time, in order among those of one tag or channel. The rules are stricter than either backend's: a message must fit its
receive in shape and dtype; a tensor must not change, nor a receive's buffer be written, until the operation is complete; no
message may be forgotten, or remain at the end. A broken rule raises `BrokenRule`, as does a deadlock, with the wait of each rank.
"""

from __future__ import annotations

import contextlib
import functools
import heapq
import pickle
import random
import sys
import threading
import traceback
from collections import deque
from dataclasses import dataclass, field
from datetime import timedelta
from types import SimpleNamespace
from typing import (  # fmt: skip
    Any,
    Callable,
    Deque,
    Dict,
    Iterator,
    List,
    NamedTuple,
    Optional,
    Sequence,
    Set,
    Tuple,
)

import pytest
import torch
import torch.distributed as dist

from ipu_pipe.backends.processes import nccl
from ipu_pipe.launcher import Launch

CLOSED = "Connection closed by peer"
UNITS = (0.0, 1e-4, 1e-3, 1e-2, 0.1)  # seconds, of which a seed draws the scale of its delays
LONGEST = 20  # deadlines after which a run must have ended
HELD_BACK = 0.8  # share of the deadline by which a message may be late without a fault
# methods of the network that replace torch's functions
OWN = (
    "isend irecv send recv all_gather all_reduce barrier all_gather_object gather_object broadcast_object_list "
    "new_group destroy_process_group"
).split()
POISON = -77  # in a buffer of integers that nothing has come into


class BrokenRule(AssertionError):
    """Raised if the code under test breaks a rule of the network, or if all of its ranks wait."""


class RankExit(BaseException):
    """Ends the thread of a rank that is killed, or whose network has ended."""


class Loss(NamedTuple):
    """Loss of a rank at its call number `at`: it is killed, or else stopped with its connections
    open."""

    rank: int
    at: int
    is_killed: bool


class Outcome(NamedTuple):
    """How a rank ended: its result or its exception, neither if it was lost; the time in
    seconds, and its place in the order of ends."""

    result: Any = None
    error: Optional[BaseException] = None
    seconds: float = 0.0
    place: int = 0


@dataclass(eq=False)
class Group:
    """A group of ranks; `is_channel`: of nccl. `touched`: the ranks that have used it."""

    ranks: Tuple[int, ...]
    is_channel: bool = False
    touched: Set[int] = field(default_factory=set)
    use: Optional[Completion] = None


@dataclass(eq=False)
class Completion:
    """An event that ranks wait for. `error`: the reason why it failed."""

    is_done: bool = False
    error: Optional[str] = None
    waiting: List[Tuple[Rank, object]] = field(default_factory=list)


@dataclass(eq=False)
class Rank:
    """A rank's thread, which runs while it has the baton; `token`: identifies its current wait,
    so that it is resumed once."""

    number: int
    baton: threading.Lock = field(default_factory=lambda: _make_taken_baton())
    calls: int = 0
    naps: int = 0  # since its newest call
    waits_for: str = ""
    token: Optional[object] = None
    has_timed_out: bool = False
    limit: Optional[float] = None  # of calls that take none
    is_stopped: bool = False
    has_failed: bool = False  # an operation of it has ended with an error
    is_leaving: bool = False  # it has done its work, as have all others
    outcome: Optional[Outcome] = None


@dataclass(eq=False)
class Post:
    """One side of a message: a tensor to send, or a buffer to receive into."""

    rank: Rank
    other: int
    tensor: torch.Tensor
    label: str
    through: Completion
    content: bytes = b""
    shape: Tuple[Any, ...] = ()

    def __post_init__(self) -> None:
        self.content, self.shape = (
            _to_bytes(self.tensor),
            (tuple(self.tensor.shape), self.tensor.dtype),
        )


class Work:
    """Handle of isend, irecv and collectives. It must not be forgotten before the operation is
    complete."""

    def __init__(
        self,
        network: Network,
        through: Completion,
        label: str,
        finish: Callable[[], None] = lambda: None,
    ) -> None:
        self._network, self._through, self._label, self._finish = network, through, label, finish
        self._rank = network.current

    def wait(self, timeout: Optional[timedelta] = None) -> None:
        """Wait until the operation is complete. Raise `RuntimeError` after the limit, or if the
        other side is lost."""
        limit = self._network.limit if timeout is None else timeout.total_seconds()
        self._network.call(f"wait for {self._label}")
        self._network.wait(self._through, self._label, limit)
        self._finish()

    def is_completed(self) -> bool:
        """Return whether the operation is complete."""
        if self._through.error is not None:
            self._rank.has_failed = True
            raise RuntimeError(self._through.error)
        return self._through.is_done

    def __del__(self) -> None:
        if not self._through.is_done and not self._rank.has_failed and self._rank.outcome is None:
            self._network.break_rule(f"{self._label} was forgotten before it was through")


class Collective:
    """One call of a collective: the values of its ranks, by rank."""

    def __init__(self, kind: Tuple[Any, ...]) -> None:
        self.kind = kind
        self.values: Dict[int, Any] = {}
        self.through: Dict[int, Completion] = {}


class Store:
    """Store of the rendezvous, on rank 0 or on the launcher."""

    def __init__(self, network: Network, has_agent: bool) -> None:
        self._network, self.has_agent = network, has_agent
        self._counts: Dict[str, int] = {}
        self._values: Dict[str, str] = {}

    @property
    def timeout(self) -> timedelta:
        """Return torch's default timeout."""
        return timedelta(seconds=self._network.limit)

    def add(self, key: str, number: int) -> int:
        """Add to a counter and return it."""

        def count() -> int:
            self._counts[key] = self._counts.get(key, 0) + number
            return self._counts[key]

        return self._request(f"add {key}", count)

    def set(self, key: str, value: str) -> None:
        """Set a value without waiting for the store."""
        self._send(f"set {key}", lambda: self._values.update({key: value}))

    def check(self, keys: Sequence[str]) -> bool:
        """Return whether all of these keys are set."""
        return self._request(f"check {keys}", lambda: all(key in self._values for key in keys))

    def get(self, key: str) -> bytes:
        """Return the value of a key."""
        return self._request(f"get {key}", lambda: self._values[key].encode())

    def delete_key(self, key: str) -> bool:
        """Delete a key and return whether it was set."""
        return self._request(f"delete {key}", lambda: self._values.pop(key, None) is not None)

    def _request(self, what: str, act: Callable[[], Any]) -> Any:
        answer: List[Any] = []
        done, limit = self._send(what, lambda: answer.append(act())), self._network.current.limit
        self._network.wait(done, f"the store's answer to {what}", limit, TimeoutError)
        return answer[0]

    def _send(self, what: str, act: Callable[[], None]) -> Completion:
        network, keeper, done = self._network, self._network.ranks[0], Completion()
        network.call(f"store.{what}")

        def arrive() -> None:
            if self.has_agent or (keeper.outcome is None and not keeper.is_stopped):
                act()
                network.complete_later([done])
            elif not keeper.is_stopped:
                network.complete(done, CLOSED)

        network.schedule(network.draw_delay(), arrive)
        return done


class Network:
    """The network of a run: `run(work)` calls `work(rank)` on each of its ranks. Within
    `install()`, it replaces torch.distributed.

    `limit`: seconds, of waits without a limit of their own. `loss`: of a rank. `holds_back`: one
    message is late by `HELD_BACK` of the deadline.
    """

    def __init__(
        self,
        seed: int,
        ranks: int,
        deadline: float,
        loss: Optional[Loss] = None,
        holds_back: bool = False,
    ) -> None:
        self.random = random.Random(seed)
        self.ranks = [Rank(number) for number in range(ranks)]
        self.current = self.ranks[0]
        self.now, self.limit, self.loss, self.lost_at = 0.0, deadline + 6.0, loss, -1.0
        self._deadline = deadline
        self._hold_back_in = self.random.randrange(1, 200) if holds_back else -1
        self._unit, self._pauses = self.random.choice(UNITS), self.random.choice((0.02, 0.3, 0.9))
        self._events: List[Tuple[float, float, int, bool, Callable[[], Optional[Rank]]]] = []
        self._numbered = self._in_flight = 0  # events in all; future events other than timeouts
        self._main, self._fault = _make_taken_baton(), ""
        self._is_over = False
        self._everyone = Group(tuple(range(ranks)))
        self._groups: List[Tuple[Dict[int, Any], Group]] = []  # values of the ranks, the group
        self._grouped = [0] * ranks  # by rank, its calls of new_group
        self._sends: Dict[Any, Deque[Post]] = {}
        self._receives: Dict[Any, Deque[Post]] = {}
        self._last: Dict[Any, float] = {}  # by tag or channel, when its newest message is through
        self._on_way: List[Tuple[Post, Post]] = []
        self._slow: Dict[Any, float] = {}
        self._collectives: Dict[Tuple[int, int], Collective] = {}
        self._collected: Dict[Tuple[int, int], int] = {}  # by group and rank
        self.store = Store(self, self.random.random() < 0.5)
        self.has_one_clock = self.random.random() < 0.8

    # ---- time

    def schedule(self, seconds: float, act: Callable[[], Any], is_timeout: bool = False) -> None:
        """Call `act` after `seconds`; it may return a rank that continues."""
        self._numbered += 1
        self._in_flight += not is_timeout
        heapq.heappush(
            self._events,
            (self.now + seconds, self.random.random(), self._numbered, is_timeout, act),
        )

    def draw_delay(self) -> float:
        """Return a random delay in seconds, which may be 0."""
        return self._unit * self.random.choice((0.0, 0.1, 1.0, self.random.expovariate(1.0)))

    def complete(self, what: Completion, error: Optional[str] = None) -> None:
        """Mark `what` as done, and resume the ranks that wait for it."""
        if not what.is_done:
            what.is_done, what.error = True, error
            for rank, token in what.waiting:
                self._resume_later(self.draw_delay(), rank, token)

    def complete_later(self, every: Sequence[Completion], error: Optional[str] = None) -> None:
        """Mark each of them as done after a random time of its own."""
        for what in every:
            if not what.is_done:
                self.schedule(self.draw_delay(), functools.partial(self.complete, what, error))

    def _resume_later(self, seconds: float, rank: Rank, token: object) -> None:
        self.schedule(seconds, lambda: self._resume(rank, token))

    def _resume(self, rank: Rank, token: object) -> Optional[Rank]:
        return rank if rank.token is token and not rank.is_stopped else None

    def call(self, what: str) -> None:
        """Count a call of the running rank, which may be lost or delayed at it."""
        rank = self.current
        rank.calls += 1
        loss = self.loss
        if self._is_over or rank.outcome is not None:
            raise RankExit
        if loss is not None and (loss.rank, loss.at) == (rank.number, rank.calls):
            self.lost_at = self.now
            rank.has_failed = True
            if loss.is_killed:
                raise RankExit
            rank.is_stopped, rank.waits_for = True, f"nothing: stopped at {what}"
            self._switch()
        rank.naps = 0
        if self.random.random() < self._pauses:
            self._pause(self.draw_delay())

    def sleep(self, seconds: float) -> None:
        """Let the running rank sleep: longer each time it only sleeps."""
        self._pause(max(seconds, min(seconds * 2.0**self.current.naps, 1.0)))
        self.current.naps += 1

    def _pause(self, seconds: float) -> None:
        rank = self.current
        rank.token = token = object()
        rank.waits_for = "a moment to pass"
        self._resume_later(seconds, rank, token)
        self._switch()

    def wait(
        self, what: Completion, label: str, limit: Optional[float], error: type = RuntimeError
    ) -> None:
        """Let the running rank wait until `what` is done. Raise `error` after the limit, or if
        it failed."""
        rank = self.current
        if not what.is_done:
            rank.token = token = object()
            rank.waits_for, rank.has_timed_out = label, False
            what.waiting.append((rank, token))

            def time_out() -> Optional[Rank]:
                rank.has_timed_out = rank.token is token
                return self._resume(rank, token)

            if limit is not None:
                self.schedule(limit, time_out, is_timeout=True)
            self._switch()
        if not what.is_done:
            rank.has_failed = True
            raise error(f"timed out after {limit} s: {label}")
        if what.error is not None:
            rank.has_failed = True
            raise RuntimeError(what.error)

    def _switch(self) -> None:
        """Play events until a rank continues, and wait for the baton if it is another rank."""
        rank = self.current
        due = self._find_next()
        if due is not rank:
            self._hand_over(due)
            rank.baton.acquire()
        if self._is_over:
            raise RankExit

    def _hand_over(self, due: Optional[Rank]) -> None:
        if due is None:
            self._main.release()
        else:
            self.current = due
            due.baton.release()

    def _find_next(self) -> Optional[Rank]:
        while self._events and not self._fault:
            moment, _, _, is_timeout, act = heapq.heappop(self._events)
            self._in_flight -= not is_timeout
            if (
                is_timeout
                and self.lost_at < 0
                and not self._in_flight
                and not any(rank.has_failed for rank in self.ranks)
            ):
                if all(rank.token is None for rank in self.ranks if rank.outcome is None):
                    continue
                self.break_rule(self._describe_waits("deadlock"))
                return None
            before, self.now = self.now, moment
            if moment > LONGEST * self._deadline:
                self.break_rule(self._describe_waits("no end"))
                return None
            due = act()
            if due is not None:
                due.token, due.waits_for = None, ""
                return due
            if is_timeout:  # of a wait that is over
                self.now = before
        return None

    def _describe_waits(self, what: str) -> str:
        left = [rank for rank in self.ranks if rank.outcome is None]
        return "\n  ".join([what, *(f"rank {r.number} waits for {r.waits_for}" for r in left)])

    def break_rule(self, why: str) -> None:
        """End the run because of a broken rule; only the first is reported."""
        self._fault = (
            self._fault or f"at {self.now:.6f} s, while rank {self.current.number} runs: {why}"
        )

    # ---- the ranks

    def run(self, work: Callable[[int], Any]) -> List[Outcome]:
        """Call `work(rank)` on all ranks, and return their outcomes. Raise `BrokenRule`."""
        threads = []
        for rank in self.ranks:
            threads.append(threading.Thread(target=self._run_rank, args=(rank, work), daemon=True))
            rank.token = object()
            self._resume_later(self.draw_delay(), rank, rank.token)
            threads[-1].start()
        due = self._find_next()
        if due is not None:
            self._hand_over(due)
            self._main.acquire()
        self._is_over = True
        # those that are stopped, or wait, end one by one
        for thread, rank in zip(threads, self.ranks):
            if thread.is_alive():
                self.current = rank
                rank.baton.release()
                thread.join()
        is_whole = self.lost_at < 0 and not any(r.has_failed or r.is_stopped for r in self.ranks)
        if is_whole and not self._fault:
            self._refuse_left_over()
        if self._fault:
            raise BrokenRule(self._fault)
        return [rank.outcome or Outcome() for rank in self.ranks]

    def _run_rank(self, rank: Rank, work: Callable[[int], Any]) -> None:
        rank.baton.acquire()
        outcome = Outcome()
        try:
            if not self._is_over:
                outcome = Outcome(work(rank.number))
        except RankExit:
            pass
        except BaseException as error:
            outcome = Outcome(None, error)
            rank.has_failed = True
        place = sum(other.outcome is not None for other in self.ranks)
        outcome = outcome._replace(seconds=self.now, place=place)
        if self._is_over:
            if not rank.is_stopped:
                rank.outcome = outcome
            return
        rank.outcome = outcome
        pending = self._list_pending(rank)
        if not rank.has_failed and outcome.result is not None and pending:
            self.break_rule(f"rank {rank.number} ended before {pending} was through")
        self._close(rank)
        self._hand_over(self._find_next())

    def _list_posts(self) -> List[Post]:
        """List the messages that one side has posted."""
        queues = (*self._sends.values(), *self._receives.values())
        return [post for posts in queues for post in posts]

    def _list_pending(self, rank: Rank) -> List[str]:
        posts = [*self._list_posts(), *(post for pair in self._on_way for post in pair)]
        return [post.label for post in posts if post.rank is rank and not post.through.is_done]

    def _close(self, rank: Rank) -> None:
        """Close the connections of a rank that has ended: operations that others wait for fail,
        or have just completed."""
        failing: List[Completion] = []
        for send, receive in list(self._on_way):
            if rank in (send.rank, receive.rank) and self.random.random() < 0.5:
                self._on_way.remove((send, receive))
                failing += [send.through, receive.through]
        posts = self._list_posts()
        failing += [p.through for p in posts if rank.number in (p.rank.number, p.other)]
        for (group, _), collective in self._collectives.items():
            ranks = self._find_group(group).ranks
            # a rank that has ended well has sent all of its part
            is_open = len(collective.values) < len(ranks)
            if rank.number in ranks and (is_open or (rank.has_failed and self.random.random() < 0.5)):  # fmt: skip
                failing += collective.through.values()
        channels = [group for _, group in self._groups if rank.number in group.ranks]
        failing += [channel.use for channel in channels if channel.use is not None]
        self.complete_later(failing, CLOSED)

    def _refuse_left_over(self) -> None:
        for post in self._list_posts():
            self.break_rule(f"left over at the end: {post.label}, without its other side")
        for (group, _), collective in self._collectives.items():
            missing = {*self._find_group(group).ranks} - {*collective.values}
            if missing:
                self.break_rule(f"left over at the end: {collective.kind}, without ranks {missing}")

    # ---- messages

    def isend(self, tensor: torch.Tensor, dst: int, group: Any = None, tag: int = 0) -> Work:
        """Send a tensor, which must not change until the operation is complete."""
        return self._post("isend", tensor, dst, group, tag)

    def irecv(self, tensor: torch.Tensor, src: int, group: Any = None, tag: int = 0) -> Work:
        """Receive a message into a tensor, which must not be read or written until the operation
        is complete."""
        with torch.no_grad():
            tensor.fill_(float("nan") if tensor.is_floating_point() else POISON)
        return self._post("irecv", tensor, src, group, tag)

    def send(self, tensor: torch.Tensor, dst: int, group: Any = None, tag: int = 0) -> None:
        """Send a tensor, and wait until the operation is complete."""
        self.isend(tensor, dst, group, tag).wait()

    def recv(self, tensor: torch.Tensor, src: int, group: Any = None, tag: int = 0) -> None:
        """Receive into a tensor."""
        self.irecv(tensor, src, group, tag).wait()

    def _post(self, kind: str, tensor: torch.Tensor, other: int, group: Any, tag: int) -> Work:
        rank, members = self.current, self._everyone if group is None else group
        label = f"{kind} between {rank.number} and {other}, tag {tag}, {tuple(tensor.shape)}"
        self.call(label)
        if other == rank.number or not {other, rank.number} <= {*members.ranks}:
            self.break_rule(f"{label}: not in the group {members.ranks}")
        if not tensor.is_contiguous():
            self.break_rule(f"{label}: not contiguous")
        if self.ranks[other].outcome is not None:
            rank.has_failed = True
            raise RuntimeError(CLOSED)
        if members.is_channel:
            self._wait_for_first_use(members)
        post = Post(rank, other, tensor, label, Completion())
        is_send = kind == "isend"
        pair = (rank.number, other) if is_send else (other, rank.number)
        key = (id(members), *pair, tag)
        sends, receives = self._sends.setdefault(key, deque()), self._receives.setdefault(key, deque())  # fmt: skip
        (sends if is_send else receives).append(post)
        while sends and receives:
            self._carry(key, sends.popleft(), receives.popleft())
        return Work(self, post.through, label)

    def _wait_for_first_use(self, group: Group) -> None:
        """Wait until both ranks of a channel use it for the first time."""
        group.touched.add(self.current.number)
        group.use = group.use or Completion()
        if len(group.touched) == len(group.ranks):
            self.complete(group.use)
        label = f"the first use of the channel of ranks {group.ranks}"
        self.wait(group.use, label, self.current.limit, TimeoutError)

    def _carry(self, key: Any, send: Post, receive: Post) -> None:
        """Deliver a message after a random time, later than earlier ones of the same tag or
        channel."""
        link = send.rank.number, receive.rank.number
        if link not in self._slow:  # the first message waits until the connection is made
            self._slow[link] = self.random.choice((1.0, 1.0, 1.0, 5.0))
            delay = 10 * self.draw_delay()
        else:
            delay = self._slow[link] * self.draw_delay()
        self._hold_back_in -= 1
        if self._hold_back_in == 0:
            delay = HELD_BACK * self._deadline
        moment = self._last[key] = max(self._last.get(key, 0.0), self.now + delay)
        self._on_way.append((send, receive))
        self.schedule(moment - self.now, lambda: self._deliver(send, receive))

    def _deliver(self, send: Post, receive: Post) -> None:
        if (send, receive) not in self._on_way:
            return
        self._on_way.remove((send, receive))
        if send.shape != receive.shape:
            self.break_rule(f"{send.label} {send.shape} comes into {receive.label} {receive.shape}")
        elif _to_bytes(send.tensor) != send.content:
            self.break_rule(f"{send.label}: changed before it was through")
        elif _to_bytes(receive.tensor) != receive.content:
            self.break_rule(f"{receive.label}: written before it was through")
        else:
            receive.tensor.detach().copy_(send.tensor)
            self.complete(receive.through)
            self.complete_later([send.through])

    # ---- groups and collectives

    def destroy_process_group(self) -> None:
        """Leave the process group."""
        self.current.is_leaving = True
        self.call("destroy_process_group")

    def new_group(self, ranks: Sequence[int], timeout: Any = None, backend: str = "gloo") -> Group:
        """Make a group; all ranks must make their groups in the same order."""
        number = self._grouped[self.current.number]
        self._grouped[self.current.number] += 1
        if number == len(self._groups):
            self._groups.append(({}, Group(tuple(ranks), backend == "nccl")))
        group = self._groups[number][1]
        self._collect(("new_group", tuple(ranks), backend), None, None, self.current.limit)
        return group

    def _find_group(self, number: int) -> Group:
        return self._everyone if number < 0 else self._groups[number][1]

    def _begin(
        self, kind: Tuple[Any, ...], value: Any, group: Optional[Group]
    ) -> Tuple[Collective, Completion]:
        """Add a value to the next collective of a group, which completes on each rank at a time
        of its own."""
        number = next((n for n, (_, other) in enumerate(self._groups) if other is group), -1)
        members, rank = self._find_group(number), self.current
        self.call(f"{kind} of ranks {members.ranks}")
        index = self._collected.get((number, rank.number), 0)
        self._collected[number, rank.number] = index + 1
        collective = self._collectives.setdefault((number, index), Collective(kind))
        if collective.kind != kind:
            self.break_rule(f"rank {rank.number} calls {kind}, others {collective.kind}")
        through = collective.through[rank.number] = Completion()
        collective.values[rank.number] = value
        if len(collective.values) == len(members.ranks):
            self.complete_later([*collective.through.values()])
        elif any(self.ranks[other].outcome is not None for other in members.ranks):
            self.complete_later([through], CLOSED)
        return collective, through

    def _collect(
        self, kind: Tuple[Any, ...], value: Any, group: Any, limit: Optional[float] = None
    ) -> Dict[int, Any]:
        """Return the values of all ranks of a group."""
        collective, through = self._begin(kind, value, group)
        self.wait(through, f"{kind} (here are {sorted(collective.values)})", limit or self.limit)
        return {rank: collective.values[rank] for rank in sorted(collective.values)}

    def _gather(
        self, kind: str, tensor: torch.Tensor, group: Any, is_async: bool, put: Callable[[Any], Any]
    ) -> Work:
        """Hand the tensors of all ranks, of one shape and dtype, to `put`."""
        content, shape = _to_bytes(tensor), (tuple(tensor.shape), tensor.dtype)
        collective, through = self._begin((kind, *shape), tensor.clone(), group)

        def finish() -> None:
            if _to_bytes(tensor) != content:
                self.break_rule(f"{kind}: a tensor changed before it was through")
            put([collective.values[rank] for rank in sorted(collective.values)])

        work = Work(self, through, f"{kind} (here are {sorted(collective.values)})", finish)
        if not is_async:
            work.wait()
        return work

    def all_gather(
        self, tensors: List[torch.Tensor], tensor: torch.Tensor, group: Any = None, async_op: bool = False
    ) -> Work:  # fmt: skip
        """Gather the tensors of all ranks of a group."""

        def put(values: List[torch.Tensor]) -> None:
            for into, value in zip(tensors, values):
                into.copy_(value)

        return self._gather("all_gather", tensor, group, async_op, put)

    def all_reduce(
        self, tensor: torch.Tensor, op: Any = dist.ReduceOp.SUM, group: Any = None, async_op: bool = False
    ) -> Work:  # fmt: skip
        """Put the sum or the maximum over all ranks into a tensor: no other operation is used."""
        assert op in (dist.ReduceOp.SUM, dist.ReduceOp.MAX)

        def put(values: List[torch.Tensor]) -> None:
            stacked = torch.stack(values)
            tensor.copy_(stacked.sum(dim=0) if op == dist.ReduceOp.SUM else stacked.amax(dim=0))

        return self._gather(f"all_reduce {op}", tensor, group, async_op, put)

    def barrier(self, group: Any = None) -> None:
        """Wait for all ranks of a group."""
        self._collect(("barrier",), None, group)

    def all_gather_object(self, objects: List[Any], value: Any, group: Any = None) -> None:
        """Gather a value of each rank."""
        values = self._collect(("all_gather_object",), pickle.dumps(value), group)
        objects[:] = map(pickle.loads, values.values())

    def gather_object(
        self, value: Any, objects: Optional[List[Any]] = None, dst: int = 0, group: Any = None
    ) -> None:
        """Gather a value of each rank on rank `dst`."""
        values = self._collect(("gather_object", dst), pickle.dumps(value), group)
        if (objects is not None) != (self.current.number == dst):
            self.break_rule("gather_object: a list of objects must be on the target alone")
        if objects is not None:
            objects[:] = map(pickle.loads, values.values())

    def broadcast_object_list(self, objects: List[Any], src: int = 0, group: Any = None) -> None:
        """Copy the values of one rank to all."""
        kind = ("broadcast_object_list", src, len(objects))
        values = self._collect(kind, pickle.dumps(objects), group)
        objects[:] = pickle.loads(values[src])

    # ---- replacements of functions that the library calls

    def answer_within(self, seconds: float, ask: Callable[[], Any]) -> Any:
        """Return `ask()`, whose answer must come within `seconds`."""
        rank = self.current
        rank.limit = seconds
        try:
            return ask()
        finally:
            rank.limit = None

    @contextlib.contextmanager
    def install(self) -> Iterator[None]:
        """Replace torch.distributed, the clock and the store of the library's processes by this
        network."""
        clock = SimpleNamespace(
            monotonic=lambda: self.now, perf_counter_ns=lambda: int(self.now * 1e9), sleep=self.sleep,
            perf_counter=lambda: self.now,
        )  # fmt: skip
        doubles: Dict[str, Any] = {
            "time": clock,
            "answer_within": self.answer_within,
            "read_launch": functools.partial(Launch, has_agent=self.store.has_agent),
            "identify_clock": lambda: "one" if self.has_one_clock else str(self.current.number),
        }
        places: List[Tuple[Any, str, Any]] = [
            *[(dist, name, getattr(self, name)) for name in OWN],
            (dist, "get_rank", lambda group=None: self.current.number),
            (dist, "get_world_size", lambda group=None: len((group or self._everyone).ranks)),
            (dist, "get_process_group_ranks", lambda group: list(group.ranks)),
            (dist, "is_initialized", lambda: True),
            (dist, "is_nccl_available", lambda: True),
            (dist.distributed_c10d, "_get_default_store", lambda: self.store),
            (nccl, "_has_each_a_device", lambda kind: True),
        ]
        for name, module in list(sys.modules.items()):
            if name.startswith("ipu_pipe.backends.") and ".ipu" not in name:
                places += [(module, *double) for double in doubles.items() if hasattr(module, double[0])]  # fmt: skip
        with pytest.MonkeyPatch.context() as patch:
            for place in places:
                patch.setattr(*place)
            yield


def _make_taken_baton() -> threading.Lock:
    """Return a lock that is taken until another thread hands it over."""
    baton = threading.Lock()
    baton.acquire()
    return baton


def _to_bytes(tensor: torch.Tensor) -> bytes:
    return tensor.detach().reshape(-1).view(torch.uint8).numpy().tobytes()


def format_error(error: BaseException) -> str:
    """Return an exception with its traceback."""
    return "".join(traceback.format_exception(type(error), error, error.__traceback__))
