"""What a rank knows of the run beside tensors: progress, data positions, limits, loss scale."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from evener.data.cursor import Cursor
from evener.engine.loss_scale import LossScale
from evener.engine.memory import MicroBatchLimits
from evener.engine.positions import Positions
from evener.engine.results import Applied, Progress, pack_applied, unpack_applied
from evener.planning.policies import Planner


class RunState:
    """What the team has applied and learnt, as this rank knows it.

    Args:
        world_size: Ranks of the team, those that are parked or absent included.
        loss_scale: That of fp16.

    Attributes:
        progress: What the team has applied.
        applied: The window that this rank has applied and that is not known to be committed.
        num_notified: Windows of whose commit this rank knows. If a rank is lost in a commit,
            those that do not know of it commit in the next generation, and may send their state
            to this one.
        cursor: Data position of the loader whose epoch was begun last.
        positions: Data positions of all loaders.
        limits: The largest micro-batches that fit.
        loss_scale: As given.
        expected_weight: Weight of the last applied window of SYNC, the guess for the next; 0 for
            none.
    """

    def __init__(self, world_size: int, loss_scale: LossScale) -> None:
        self.progress = Progress()
        self.applied: Applied | None = None
        self.num_notified = 0
        self.cursor: Cursor | None = None
        self.positions = Positions()
        self.limits = MicroBatchLimits(world_size)
        self.loss_scale = loss_scale
        self.expected_weight = 0.0

    @property
    def open_cursor(self) -> Cursor:
        """Return the data position of the epoch that was begun last."""
        assert self.cursor is not None, "no epoch was begun"
        return self.cursor

    def data(self, batch_size: int) -> dict[str, int]:
        """Return the fields of a row that must be the same on all ranks."""
        cursor = self.open_cursor
        return {
            "num_samples": cursor.num_samples,
            "batch_size": batch_size,
            "seed": cursor.seed % 2**53,
        }

    @property
    def late_fields(self) -> Mapping[str, Any]:
        """Return what this rank's report of this window says of the previous one."""
        return {} if self.applied is None else self.applied.late_fields

    def advance(self, *, made: int, skipped: int, samples: int, weight: float) -> None:
        """Count a window that was applied, of some optimizer steps."""
        before = self.progress
        self.progress = Progress(
            window=before.window + 1,
            steps=before.steps + made,
            samples=before.samples + samples,
            weight=before.weight + weight,
            skipped=before.skipped + skipped,
        )

    def lease_applied(self) -> None:
        """Lease the samples of the applied, uncommitted window again."""
        if self.applied is not None and self.cursor is not None:
            for lease in self.applied.leases:
                self.cursor.lease(lease)

    # ── for ranks that were away ─────────────────────────────────────────────────────────────────

    def counters(self) -> dict[str, Any]:
        """Return, in JSON, what belongs to a model of the present."""
        return {
            "progress": asdict(self.progress),
            "loss_scale": self.loss_scale.state_dict(),
            "expected_weight": self.expected_weight,
        }

    def load_counters(self, counters: Mapping[str, Any]) -> None:
        """Undo ``counters``."""
        self.progress = Progress(**counters["progress"])
        self.loss_scale.load_state_dict(counters["loss_scale"])
        self.loss_scale.reset()
        self.expected_weight = counters["expected_weight"]

    def for_joiner(self) -> dict[str, Any]:
        """Return, in JSON, what a rank needs that has not taken part so far."""
        return {
            **self.counters(),
            **self.positions.state_dict(self.cursor),
            "limits": self.limits.known,
            "applied": None if self.applied is None else pack_applied(self.applied),
        }

    def load_for_joiner(self, state: Mapping[str, Any]) -> None:
        """Undo ``for_joiner``."""
        self.load_counters(state)
        self.cursor = self.positions.load_state_dict(state) or self.cursor
        self.limits.learn(dict(enumerate(state["limits"])))
        packed = state["applied"]
        self.applied = None if packed is None else unpack_applied(packed)
        self.lease_applied()

    # ── for checkpoints ──────────────────────────────────────────────────────────────────────────

    def state_dict(self, policy: Planner, members: Sequence[str]) -> dict[str, Any]:
        """Return progress and what was learnt, in JSON; no model, no optimizers.

        Args:
            policy: What it has learnt is saved, too.
            members: The ranks' names, which stay the same when ranks get new numbers.
        """
        return {
            "progress": asdict(self.progress),
            "planner": policy.state_dict(),
            "micro_batch_limits": self.limits.state_dict(members),
            "loss_scale": self.loss_scale.state_dict(),
        }

    def load_state_dict(
        self, state: Mapping[str, Any], policy: Planner, members: Sequence[str], rank: int
    ) -> None:
        """Continue from ``state_dict``; of a team of any size."""
        policy.load_state_dict(state["planner"])
        self.limits.load_state_dict(state["micro_batch_limits"], members, rank)
        self.loss_scale.load_state_dict(state["loss_scale"])
        self.loss_scale.reset()
        self.progress = Progress(**state["progress"])
        self.num_notified = self.progress.window
