"""Print what became of each act between two calls of `Pipeline`, on one backend, over seeds.

    python -m tests.seam_table --seeds 20                        this tree, on the emulator
    python -m tests.seam_table --seeds 20 --library ../old       the library of another tree, with this tree's acts and oracles
    python -m tests.seam_table --seeds 3 --backend distributed   two processes

A walk has one act in a drawn method, cut and N (`tests.support.acts.draw_single`). It is

    equal     if its weights are those of plain PyTorch or of the literal replay
    drained   if they are after the drain that a refusal asked for
    refused   if the act cannot be had at all
    silent    if it trained other weights without a word
    failed    if it raised anything else
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import warnings
from collections import Counter
from pathlib import Path
from typing import Any, Dict, List, Sequence

WORDS = {"differs": "silent"}
COLUMNS = ("equal", "drained", "refused", "silent", "failed")
Table = Dict[str, "Counter[str]"]


def count_outcomes(walks: Dict[str, List[Any]], outcomes: Sequence[Any]) -> Table:
    """Return how often each act had which outcome; `outcomes`: in the order of the walks."""
    table: Table = {}
    following = iter(outcomes)
    for act, drawn in walks.items():
        words = []
        for walk, outcome in zip(drawn, following):
            is_drained = outcome.kind == "equal" and outcome.walk.plan != walk.plan
            words.append("drained" if is_drained else WORDS.get(outcome.kind, outcome.kind))
        table[act] = Counter(words)
    return table


def judge_on_rank(rank: int, folder: Path, walks: List[Any], backend: str) -> None:
    """Judge walks on this rank, and store what became of each."""
    import torch

    from tests.support.acts import judge, train_by_pipeline

    outcomes = [judge(walk, lambda one: train_by_pipeline(one, backend=backend)) for walk in walks]
    torch.save(outcomes, folder / f"{rank}.pt")


def judge_walks(walks: List[Any], backend: str) -> List[Any]:
    """Return the outcome of each walk; of two ranks the one that is not equal, if there is one."""
    if backend != "distributed":
        from tests.support.acts import judge

        return [judge(walk) for walk in walks]
    import torch

    from tests.support.processes import run_in_group

    with tempfile.TemporaryDirectory() as name:
        run_in_group(2, judge_on_rank, Path(name), walks, backend, seconds=3600)
        pairs = zip(*(torch.load(Path(name) / f"{r}.pt", weights_only=False) for r in range(2)))
        return [max(pair, key=lambda outcome: outcome.kind != "equal") for pair in pairs]


def format_table(table: Table) -> str:
    """Return the table in Markdown, acts with silent walks first, and the sums."""
    rows = sorted(table.items(), key=lambda row: -row[1]["silent"])
    total: Counter[str] = sum(table.values(), Counter())
    lines = [f"| act | {' | '.join(COLUMNS)} |", "| --- |" + " --- |" * len(COLUMNS)]
    for act, counts in [*rows, ("all", total)]:
        lines.append(f"| {act} | " + " | ".join(str(counts[c] or "") for c in COLUMNS) + " |")
    return "\n".join(lines)


def main() -> None:
    """Judge the walks that the arguments ask for, and print the table."""
    parser = argparse.ArgumentParser(description="Print what became of acts between two calls.")
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--backend", choices=("emulator", "distributed"), default="emulator")
    parser.add_argument("--library", help="a tree whose ipu_pipe is tried instead of this one")
    parser.add_argument("--act", action="append", help="only these acts")
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    # ipu_pipe alone comes from there, acts and oracles from this tree
    sys.path.insert(0, args.library or "")
    import ipu_pipe

    del sys.path[0]
    import torch

    from tests.support.acts import ACTS, CUTS, draw_single

    torch.set_num_threads(1)
    seeds = range(args.first, args.first + args.seeds)
    # one stage a process, because a split backward takes no more
    cuts = CUTS[:1] if args.backend == "distributed" else CUTS
    walks = {act: [draw_single(act, seed, cuts) for seed in seeds] for act in args.act or ACTS}
    outcomes = judge_walks([walk for drawn in walks.values() for walk in drawn], args.backend)
    print(f"{Path(str(ipu_pipe.__file__)).parent.parent.name}, {args.backend}, seeds {seeds}\n")
    print(format_table(count_outcomes(walks, outcomes)))
    for line, walk in {o.line: o.walk for o in outcomes if o.kind == "failed"}.items():
        print(f"\nfailed: {line}\n        {walk}")


if __name__ == "__main__":
    main()
