"""Ranks, links and windows in virtual time. Pure: times are numbers."""

import math
from bisect import bisect_right
from dataclasses import dataclass
from statistics import fmean
from typing import NamedTuple

from evener.planning.report import Report
from evener.planning.speed import CostModel, num_micro_batches

#: Bytes of a parameter, or a gradient, in an exchange.
BYTES_PER_PARAMETER = 4


class Noise(NamedTuple):
    """Disturbances of a rank, over the windows of a run, repeated endlessly.

    They depend on time: a disturbance of two ranks at once is repeated on both, with its duration.

    Attributes:
        factors: Factors of the compute time, one for each window.
        ends_s: When each window ended, in seconds from the beginning of the first one.
    """

    factors: tuple[float, ...]
    ends_s: tuple[float, ...]

    def lengthen(self, plain_s: float, at_s: float) -> float:
        """Return the seconds of a computation that begins at ``at_s``.

        A disturbance slows what is computed while it lasts, and nothing afterwards: otherwise a
        long one would slow a team for longer than it has slowed the run.

        Args:
            plain_s: Seconds that the computation takes undisturbed.
            at_s: When it begins.
        """
        at_s %= self.ends_s[-1]
        window, done_s = bisect_right(self.ends_s, at_s), 0.0
        while plain_s * self.factors[window] > (left_s := self.ends_s[window] - at_s):
            done_s += left_s
            plain_s -= left_s / self.factors[window]
            window = (window + 1) % len(self.ends_s)
            at_s = self.ends_s[window - 1] if window else 0.0
        return done_s + plain_s * self.factors[window]


UNDISTURBED = Noise((1.0,), (math.inf,))


@dataclass
class SimulatedRank:
    """The compute time of a rank.

    Subclasses may lengthen times otherwise; the simulation only calls ``share`` and ``step``.

    Attributes:
        cost: Seconds of compute; ``window_s`` is the optimizer's update.
        micro_batch_size: Most samples in one forward and backward; ``None`` for all in one.
        overhead_s: Seconds beside compute for each micro-batch, such as fetching data.
        noise: Disturbances of the compute time.
        name: A text such as ``rank 1 (cpu)``.
        alone_factor: Its measured speed alone over that of ``cost``.
    """

    cost: CostModel
    micro_batch_size: int | None = None
    overhead_s: float = 0.0
    noise: Noise = UNDISTURBED
    name: str = ""
    alone_factor: float = 1.0

    def alone(self, batch_size: int) -> float:
        """Return samples per second of the rank alone, with an update for each batch."""
        usual = self.cost.scaled(fmean(self.noise.factors))
        return self.alone_factor * batch_size / usual.seconds(batch_size, self.micro_batch_size)

    def lengthen(self, plain_s: float, at_s: float) -> float:
        """Return the seconds of a computation that begins at ``at_s``; see ``Noise``."""
        return self.noise.lengthen(plain_s, at_s)

    def share(self, samples: int, at_s: float, update_parts: int = 1) -> Report:
        """Return the rank's report of its share of a window of SYNC.

        Args:
            samples: Samples of the share.
            at_s: When it begins.
            update_parts: Number of parts into which ranks divide the update.
        """
        micro_batches = num_micro_batches(samples, self.micro_batch_size)
        update_s = self.cost.window_s / update_parts
        plain_s = self.cost.seconds(samples, self.micro_batch_size) - self.cost.window_s + update_s
        compute_s = self.lengthen(plain_s, at_s)
        return Report(
            weight=float(samples),
            samples=samples,
            micro_batches=micro_batches,
            compute_s=compute_s,
            update_s=update_s * (compute_s / plain_s if plain_s else 1.0),
            update_parts=update_parts,
            busy_s=compute_s + micro_batches * self.overhead_s,
        )

    def last_micro_batch_s(self, samples: int) -> float:
        """Return the usual seconds of the last micro-batch of a share; 0 without one."""
        earlier = max(0, num_micro_batches(samples, self.micro_batch_size) - 1)
        rest = samples - earlier * (self.micro_batch_size or samples)
        return self.cost.fixed_s + self.cost.per_sample_s * rest if rest else 0.0

    def step(self, samples: int, at_s: float) -> Report:
        """Return the rank's report of a local step on ``samples``; see ``share``."""
        return self.share(samples, at_s)._replace(steps=1, update_s=0.0, update_parts=0)


@dataclass(frozen=True)
class Link:
    """Duration of an exchange, and the bytes that each rank sends.

    An exchange is a ring: each of n ranks sends its tensor in n parts, 2 (n - 1) of them.

    In SYNC, gradients may travel while backward computes those of other layers, in a rank's last
    micro-batch. If that takes m seconds on the rank where it is shortest, ranks wait for

        max(never_hidden · E, E - hides · m)

    of the E seconds of an exchange: it cannot begin before the first gradients are computed, and
    the last ones travel after backward.

    Attributes:
        num_bytes: Bytes of the tensor that is exchanged.
        transfer_s: Seconds to send all of it from one rank to another.
        latency_s: Seconds until the smallest message arrives.
        meeting_s: Seconds of the round of rows before an exchange, once all have arrived.
        hides: Fraction of the last micro-batch behind which an exchange is hidden; 0 hides nothing.
        never_hidden: Fraction of an exchange that is not hidden however long backward takes.
    """

    num_bytes: int = 0
    transfer_s: float = 0.0
    latency_s: float = 0.0
    meeting_s: float = 0.0
    hides: float = 0.0
    never_hidden: float = 0.0

    def exchange_s(self, num_ranks: int) -> float:
        """Return the seconds of an exchange between ``num_ranks`` ranks."""
        messages = 2 * (num_ranks - 1)
        return messages * (self.transfer_s / num_ranks + self.latency_s)

    def exposed_s(self, num_ranks: int, micro_batch_s: float) -> float:
        """Return the seconds of an exchange that ranks wait for.

        Args:
            num_ranks: Number of ranks.
            micro_batch_s: Seconds of the last micro-batch, on the rank where it is shortest.
        """
        exchange_s = self.exchange_s(num_ranks)
        return max(self.never_hidden * exchange_s, exchange_s - self.hides * micro_batch_s)

    def wait_s(self, num_ranks: int) -> float:
        """Return the seconds for which even the last rank waits for the others' rows."""
        return self.meeting_s if num_ranks > 1 else 0.0

    def sent_bytes(self, num_ranks: int) -> float:
        """Return the bytes that each rank sends in an exchange."""
        return 2 * (num_ranks - 1) * self.num_bytes / num_ranks


class SimulatedWindow(NamedTuple):
    """A window that has been applied; sequences are by rank.

    Attributes:
        present: Ranks that took part; the figures of others are 0.
        reports: The ranks' reports.
        elapsed_s: Seconds from applying the previous window to applying this one.
        waits_s: Seconds of waiting for others.
        exchanges_s: Seconds of the exchange in which a rank did nothing else.
    """

    present: tuple[int, ...]
    reports: tuple[Report, ...]
    elapsed_s: tuple[float, ...]
    waits_s: tuple[float, ...]
    exchanges_s: tuple[float, ...]

    @property
    def length_s(self) -> float:
        """Return the seconds of the slowest rank."""
        return max(self.elapsed_s)

    @property
    def samples(self) -> int:
        """Return the samples of all ranks."""
        return sum(report.samples for report in self.reports)
