"""Where a process stands among those of a run."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Layout:
    """Where this process stands: `depth` stages, of which it holds `stage`, in each of `width` replicas of the pipeline."""

    rank: int
    depth: int
    width: int = 1

    @property
    def stage(self) -> int:
        """Stage of this rank."""
        return self.rank % self.depth

    @property
    def replica(self) -> int:
        """Replica of this rank."""
        return self.rank // self.depth

    def rank_of(self, stage: int) -> int:
        """The rank that holds `stage` in the same replica."""
        return self.replica * self.depth + stage
