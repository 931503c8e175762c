"""Compare weight versions with the simulated rules and with the closed forms of the papers."""

from __future__ import annotations

import itertools
from typing import Any, Dict, List, Tuple

import numpy as np
import pytest
from slot_simulation import PLAYED, Simulated, simulate

from ipu_pipe.errors import BadInput
from ipu_pipe.schedule.actions import Kind
from ipu_pipe.schedule.global_history import find_steady_range, summarize_history_delays
from ipu_pipe.schedule.methods import METHODS, Method, Reads, resolve_method
from ipu_pipe.schedule.rows import from_rows
from ipu_pipe.schedule.timelines import make_schedule
from ipu_pipe.schedule.versions import VersionTable, count_weight_copies

# Every preset, and the other schedules and reads that a config may have.
VARIANTS: Dict[str, Method] = {
    **{
        name: method
        for name, method in PLAYED.items()
        if method.history is None and method.rounds is None
    },
    "pb stashing": resolve_method("pipelined_backprop", {"stash": True}),
    "pipedream dataflow": resolve_method("pipedream", {"schedule": "dataflow", "turn": 1}),
    "pipemare 1f1b": resolve_method("pipemare", {"schedule": "1f1b"}),
}


def make_version_table(method: Method, P: int, M: int, N: int) -> VersionTable:
    return VersionTable(make_schedule(method, P, M, N), method)


def replay_versions(
    method: Method, simulated: Simulated, P: int, M: int, N: int
) -> Tuple[List[List[int]], List[List[int]]]:
    """Return the versions that each pass reads by the rule, counting the updates of its stage
    one by one."""

    def count_updates(s: int, kind: str, m: int) -> int:
        return sum(slot < simulated.slots[s, kind, m] for slot, _ in simulated.updates[s])

    forward = [[count_updates(s, "F", m) for m in range(M)] for s in range(P)]
    # a single stage is not a pipeline: it reads the newest weights
    if method.forward_reads is Reads.DOUBLE_BUFFERED and P > 1:
        forward = [[max(m // N - 1, 0) for m in range(M)] for _ in range(P)]
    backward = [[count_updates(s, "B", m) for m in range(M)] for s in range(P)]
    return forward, forward if method.backward_reads is Reads.STASHED else backward


def count_copies(
    simulated: Simulated, forward: List[int], backward: List[int], s: int, M: int
) -> int:
    """Walk through the events of one stage. Return the most versions that are the newest or are
    read later, after any event."""
    events = [(simulated.slots[s, "F", m], 0, forward[m]) for m in range(M)]
    events += [(simulated.slots[s, "B", m], 1, backward[m]) for m in range(M)]
    events += [(slot, 2, k + 1) for slot, k in simulated.updates[s]]
    events.sort()
    newest, most = 0, 1
    for position, (_, order, version) in enumerate(events):
        newest = version if order == 2 else newest
        later_reads = {read for _, when, read in events[position + 1 :] if when < 2}
        most = max(most, len({v for v in later_reads if v <= newest} | {newest}))
    return most


@pytest.mark.parametrize("name", VARIANTS)
def test_versions_and_copies_equal_the_simulated_ones(name: str) -> None:
    """Also those of a window, which equals that part of the whole."""
    method = VARIANTS[name]
    for P, M, N in itertools.product((1, 2, 3, 5, 7), (1, 4, 13, 20), (1, 2, 3, 7, 20)):
        if method.forward_reads is Reads.DOUBLE_BUFFERED and N < P:
            continue
        simulated = simulate(method.pipeline, P, M, N, method.turn)
        forward, backward = replay_versions(method, simulated, P, M, N)
        versions = make_version_table(method, P, M, N)
        assert versions.forward(0, M).tolist() == forward, (P, M, N)
        assert versions.backward(0, M).tolist() == backward, (P, M, N)
        part = versions.backward(M // 3, M // 2, slice(P // 2, P)).tolist()
        assert part == [row[M // 3 : M // 2] for row in backward[P // 2 :]]
        copies = [count_copies(simulated, forward[s], backward[s], s, M) for s in range(P)]
        assert count_weight_copies(versions).tolist() == copies, (P, M, N)


@pytest.mark.parametrize(
    "args", [{"hogwild": {"max": 6, "mean": 2.0}}, {"constant_delay": {"updates": 5}}], ids=str
)
def test_no_delay_of_a_method_reaches_over_a_drain(args: Dict[str, Any]) -> None:
    """The pipeline is empty there: the first batch after it reads what all updates have made."""
    method = resolve_method("pipelined_backprop", args)
    schedule = make_schedule(method, 3, 20, 1, [7, 12])
    for versions in VersionTable(schedule, method).window(0, 20):
        begins = np.select([np.arange(20) >= 12, np.arange(20) >= 7], [12, 7], 0)
        assert (versions >= begins).all() and (versions[:, [0, 7, 12]] == [0, 7, 12]).all()


@pytest.mark.parametrize("P, N", [(2, 1), (5, 3), (7, 4), (30, 40)])
def test_greatest_steady_staleness(P: int, N: int) -> None:
    """A short run has the staleness of a long one. PipeMare: Table 1."""
    s = np.arange(P)
    waits = {"pipemare": 2 * (P - 1 - s) + 1, "pipelined_backprop": 2 * (P - 1 - s), "pipedream": P - 1 - s}  # fmt: skip
    waits.update({"pb stashing": waits["pipelined_backprop"], "gpipe": 0 * s, "naive": 0 * s})
    for name, microbatches in waits.items():
        versions = make_version_table(VARIANTS[name], P, 1, N)
        staleness = -(-microbatches // N)
        assert (versions.greatest_lag() == staleness).all(), name
        is_stashed = VARIANTS[name].backward_reads is Reads.STASHED
        assert (versions.greatest_backward_lag() == staleness * is_stashed).all(), name
    two = make_version_table(VARIANTS["pipedream_2bw"], P, 1, max(N, P))
    assert two.greatest_lag().tolist() == [1] * P


def test_copies_after_a_drain() -> None:
    """A checkpoint at a drain has only the newest version, which the first batch of 2BW after it
    reads, as at the start."""
    schedule = make_schedule(METHODS["pipedream_2bw"], 2, 20, 4, drains=[4, 16])
    versions = VersionTable(schedule, METHODS["pipedream_2bw"])
    assert versions.forward(0, 20)[:, ::4].tolist() == [[0, 1, 1, 2, 4]] * 2
    assert count_weight_copies(versions).tolist() == [2, 2]
    single = make_schedule(METHODS["pipedream_2bw"], 2, 8, 4, drains=[4])
    assert count_weight_copies(VersionTable(single, METHODS["pipedream_2bw"])).tolist() == [1, 1]
    longer = make_schedule(VARIANTS["pb stashing"], 3, 21, 1, drains=[1, 3, 20])
    assert count_weight_copies(VersionTable(longer, VARIANTS["pb stashing"])).tolist() == [5, 3, 1]


# --- global history


@pytest.mark.parametrize("name", [name for name, method in VARIANTS.items() if method.is_stale])
def test_global_history_counted_entry_by_entry(name: str) -> None:
    method = VARIANTS[name]
    for P, M, N in ((1, 9, 1), (3, 40, 3), (4, 32, 4), (5, 47, 6), (4, 8, 8), (2, 1, 2)):
        simulated = simulate(method.pipeline, P, M, N, method.turn)
        entries = sorted((slot, s, k) for s in range(P) for slot, k in simulated.updates[s])
        forward, _ = replay_versions(method, simulated, P, M, N)
        versions = make_version_table(method, P, M, N)
        first, last = find_steady_range(versions)
        delays = []
        for m in range(first, last):
            for a in range(P):
                written_count = sum(
                    (slot, s) < (simulated.slots[a, "B", m], a) for slot, s, _ in entries
                )
                for r in range(P):
                    read_count = sum(
                        (slot, s) < (simulated.slots[r, "F", m], r) for slot, s, _ in entries
                    )
                    while sum(s == r for _, s, _ in entries[:read_count]) > forward[r][m]:
                        # go back to the latest iterate with the version that is read
                        read_count -= 1
                    delays.append(written_count - read_count)
        greatest, mean = summarize_history_delays(versions)
        assert (greatest, mean) == (
            max(delays),
            pytest.approx(sum(delays) / len(delays), rel=1e-12),
        ), (P, M, N)


def test_the_middle_leaves_out_the_outer_quarters_in_whole_batches() -> None:
    assert find_steady_range(make_version_table(METHODS["pipedream"], 2, 400, 1)) == (100, 300)
    assert find_steady_range(make_version_table(METHODS["pipemare"], 2, 100, 8)) == (32, 72)
    # no whole batch remains
    assert find_steady_range(make_version_table(METHODS["pipemare"], 2, 10, 8)) == (3, 8)


def test_global_history_is_undefined_for_methods_that_flush() -> None:
    for name in ("naive", "gpipe", "pipedream_flush", "local_greedy"):
        assert summarize_history_delays(make_version_table(METHODS[name], 4, 16, 4)) == (None, None)


# --- reads that cannot be replayed


def test_a_double_buffered_read_of_a_version_not_made_yet_is_refused() -> None:
    """In 2BW with N = 2, F4 reads version 1, which B1 makes."""
    last = "F0 B0 F1 B1 F2 B2 F3 B3 F4 B4 F5 B5".split()
    too_early = from_rows(["F0 F1 F2 F3 F4 B0 B1 F5 B2 B3 B4 B5".split(), last], 2)
    with pytest.raises(BadInput, match="F4 on stage 0"):
        VersionTable(too_early, METHODS["pipedream_2bw"]).window(0, 6)


@pytest.mark.parametrize("forward, backward, newest, message", [
    (-1, 0, 9, "F5 on stage 2 reads a version below 0"),
    (3, 3, 2, "F5 on stage 2"),
    (1, 3, 2, "B5 on stage 2"),
    (2, 1, 9, "B5 on stage 2 reads an older version than its forward"),
    (1, 6, 9, "B5 on stage 2 reads an update made by its own or a later microbatch"),
])  # fmt: skip
def test_reads_that_cannot_be_replayed_are_refused_by_name(
    forward: int, backward: int, newest: int, message: str
) -> None:
    """No planned schedule does this: pass the check one altered read of microbatch 5 on stage 2,
    N = 1."""
    versions = make_version_table(METHODS["pipelined_backprop"], 3, 8, 1)
    cell = [np.array([[value]]) for value in (forward, backward, newest)]
    with pytest.raises(BadInput, match=message):
        versions._check(
            cell[0], cell[1], {Kind.FORWARD: cell[2], Kind.BACKWARD: cell[2]}, 5, slice(2, 3)
        )
