"""Options of ``Ddp.setup`` beyond its arguments."""

import math
import numbers
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Literal, Self, TypeGuard

from evener.data.sharding import is_whole
from evener.errors import ConfigError
from evener.planning.elche import ANCHOR, MAX_ANCHOR, ElChe
from evener.planning.guard import DivergenceGuard, make_guard
from evener.planning.policies import LOCAL_OPTIONS, ApplyPolicy


@dataclass(frozen=True, slots=True, kw_only=True)
class DdpConfig:
    """Options of ``Ddp.setup`` beyond its arguments.

    Those that act in CADENCE and ASYNC alone are refused with policy ``"sync"``.

    Attributes:
        max_grad_norm: Clip the averaged gradient to this 2-norm; ``None`` does not clip.
        non_finite: ``"raise"`` stops every rank on a non-finite loss or gradient; ``"skip"``
            leaves the window out on every rank.
        speed_hint: Speeds of the ranks relative to one another, a larger number for a faster rank:
            one for each rank, such as ``(1.0, 0.33)``, or by rank, such as ``{1: 0.33}``, where a
            rank that is not named has speed 1. ``with_speed_hint`` says how slow a rank is instead.
            Replaces the calibration before the first window. Where measurement contradicts it,
            rank 0 warns.
        partition_ratios: Shares of the ranks relative to one another, the same in every window;
            replaces planning altogether. 0 gives a rank nothing to do.
        anchor: CADENCE and ASYNC: local steps of the slowest rank in a window, to start from; 10
            if left out.
        overhead_target: CADENCE and ASYNC: part of the time that averaging may take before the
            anchor grows, from 0.01 to 0.50; 0.10 if left out.
        max_anchor: CADENCE and ASYNC: largest anchor; 0 keeps it from growing. 200 if left out.
        max_batch_diff: CADENCE and ASYNC: most local steps by which a rank may be ahead of another
            in a window; 0 is lockstep, ``None`` no limit. With a limit, ranks wait for one that
            turns slow.
        divergence_guard: CADENCE and ASYNC: ``"level"`` keeps the anchor from growing at the third
            of three rising divergences of the ranks, and halves it while they keep rising;
            ``"none"``, ``None`` or ``False`` does not look; a ``DivergenceGuard`` of your own
            decides by itself.
        divergence_threshold: CADENCE and ASYNC: divergence, relative to the norm of the parameters,
            below which ``"level"`` does nothing; 0.05 if left out.
        lr_scale_ratio: CADENCE and ASYNC: multiplies the learning rate by
            ``1 + (world_size - 1) * lr_scale_ratio``; 0 leaves it as it is.
        verify_every: After every so many windows, at the end of an epoch, before a checkpoint and
            on leaving, compare the parameters and averaged buffers of all ranks by hashes, and
            raise ``ReplicasDifferError`` where they differ; 0 does not look. In CADENCE and ASYNC
            it is their consensus, when the next window is exchanged or the epoch ends. If left out,
            0, and 1 in a ``DistributedTrainer``.
        gradient_buckets: SYNC: labels with names of parameters, such as
            ``[("block 1", ["1.weight", "1.bias"]), ("block 0", ["0.weight"])]``: gradients are
            exchanged in that order, those of a bucket at once, and what no bucket names at the end.
            ``None`` exchanges all at once.
        timeout_s: Longest wait for another rank, in seconds.
        emulate_slow: Factor per rank by which to slow it on purpose, such as ``{1: 3.0}``.
        stop_when: Asked after each micro-batch; when it returns true the team stops, dropping the
            window that is being computed.
        quiet: Do not print the team to stderr; warnings are always printed.
    """

    max_grad_norm: float | None = None
    non_finite: Literal["raise", "skip"] = "raise"
    speed_hint: Sequence[float] | Mapping[int, float] | None = None
    partition_ratios: Sequence[float] | None = None
    anchor: int | None = None
    overhead_target: float | None = None
    max_anchor: int | None = None
    max_batch_diff: int | None = None
    divergence_guard: str | bool | DivergenceGuard | None = "level"
    divergence_threshold: float | None = None
    lr_scale_ratio: float = 0.0
    verify_every: int | None = None
    gradient_buckets: Sequence[tuple[str, Sequence[str]]] | None = None
    timeout_s: float = 600.0
    emulate_slow: Mapping[int, float] = field(default_factory=dict)
    stop_when: Callable[[], bool] | None = None
    quiet: bool = False

    def __post_init__(self) -> None:
        self._check_types()
        self._check_numbers()
        for name in ("speed_hint", "partition_ratios"):
            values = getattr(self, name)
            least = "above 0" if name == "speed_hint" else "of 0 or more, not all 0"
            by_rank = name == "speed_hint" and _is_by_rank(values)
            numbers_given = list(values.values()) if by_rank else values
            if values is not None and not _fits(numbers_given, positive=name == "speed_hint"):
                raise ConfigError(
                    f"{name} is {values!r}; give a finite number {least} for each rank, relative "
                    "to one another, such as (1.0, 0.33)"
                    + (" or {1: 0.33}" if name == "speed_hint" else "")
                )
        if self.speed_hint is not None and self.partition_ratios is not None:
            raise ConfigError(
                f"speed_hint is {self.speed_hint!r} and partition_ratios "
                f"{self.partition_ratios!r}; fixed shares need no speeds: give one of them"
            )
        largest = self._largest_anchor
        if self.anchor is not None and 0 < largest < self.anchor:
            raise ConfigError(
                f"anchor is {self.anchor}, above max_anchor ({largest}); lower it, or raise "
                "max_anchor"
            )
        # Refuses bad numbers here, and not when training begins.
        self.make_cadence(1).with_max_batch_diff(self.max_batch_diff)
        make_guard(self.divergence_guard, self.divergence_threshold)

    def with_speed_hint(self, slow_rank: int, ratio: float) -> Self:
        """Return a copy that takes one rank for slower than all others, until it is measured.

        Args:
            slow_rank: The slow rank.
            ratio: How many times as fast the others are; 1 or more.

        Raises:
            ConfigError: A number is out of range.
        """
        if not is_whole(slow_rank) or slow_rank < 0:
            raise ConfigError(f"slow_rank is {slow_rank!r}; give the number of a rank, from 0")
        if not _is_number(ratio) or not 1 <= ratio < math.inf:
            raise ConfigError(
                f"ratio is {ratio!r}: it is how many times as fast the other ranks are as rank "
                f"{slow_rank}; give a finite number of 1 or more, or name another rank"
            )
        return replace(self, speed_hint={slow_rank: 1.0 / ratio})

    def hinted_speeds(self, world_size: int) -> tuple[float, ...] | None:
        """Return the speeds of ``speed_hint`` by rank, if there is one."""
        if self.speed_hint is None:
            return None
        if isinstance(self.speed_hint, Mapping):
            return tuple(float(self.speed_hint.get(rank, 1.0)) for rank in range(world_size))
        return tuple(map(float, self.speed_hint))

    def check_policy(self, policy: ApplyPolicy) -> None:
        """Refuse options that were given and have no effect with the policy.

        Raises:
            ConfigError: Names the first one and the remedy.
        """
        for option in fields(self) if policy is ApplyPolicy.SYNC else ():
            value = getattr(self, option.name)
            if option.name in LOCAL_OPTIONS and value != option.default:
                raise ConfigError(
                    f"{option.name} is {value!r}, but has no effect with policy 'sync', which "
                    "averages gradients in every optimizer step; leave it out, or use policy "
                    "'cadence' or 'async'"
                )
        if policy is not ApplyPolicy.SYNC and self.partition_ratios is not None:
            raise ConfigError(
                f"partition_ratios is {list(self.partition_ratios)} with policy {policy.value!r}, "
                "whose windows are closed by time; give speed_hint instead, or use policy 'sync'"
            )

    def check_team(self, world_size: int) -> None:
        """Refuses options that name ranks which are not there; on every rank alike.

        Raises:
            ConfigError: Not one number for each rank, or a rank that the team does not have.
        """
        for name in ("speed_hint", "partition_ratios"):
            values = getattr(self, name)
            if isinstance(values, Sequence) and len(values) != world_size:
                raise ConfigError(
                    f"{name} is {values!r}, {len(values)} numbers for a team of {world_size}; give "
                    "one for each rank"
                )
        for name in ("emulate_slow", "speed_hint"):
            values = getattr(self, name)
            for rank in values if isinstance(values, Mapping) else ():
                if rank not in range(world_size):
                    raise ConfigError(
                        f"{name} names rank {rank!r}, but the team has ranks 0 to {world_size - 1}"
                    )

    def _check_types(self) -> None:
        whole = ("anchor", "max_anchor", "max_batch_diff", "verify_every")
        real = (
            *("max_grad_norm", "overhead_target", "divergence_threshold", "lr_scale_ratio"),
            "timeout_s",
        )
        for name in (*whole, *real):
            value = getattr(self, name)
            fits = is_whole(value) if name in whole else _is_number(value)
            optional = name not in ("lr_scale_ratio", "timeout_s")
            if fits or (value is None and optional):
                continue
            what = "a whole number" if name in whole else "a number"
            raise ConfigError(f"{name} is {value!r}; give {what}{' or None' if optional else ''}")
        if not isinstance(self.emulate_slow, Mapping):
            raise ConfigError(
                f"emulate_slow is {self.emulate_slow!r}; give a factor for each rank to be "
                "slowed, such as {1: 3.0}"
            )
        stop_when: object = self.stop_when
        if stop_when is not None and not callable(stop_when):
            raise ConfigError(f"stop_when is {stop_when!r}; give a function without arguments")
        if self.gradient_buckets is not None and not _are_buckets(self.gradient_buckets):
            raise ConfigError(
                f"gradient_buckets is {self.gradient_buckets!r}; give pairs of a label and a list "
                "of parameter names, such as [('head', ['head.weight', 'head.bias'])]"
            )

    def _check_numbers(self) -> None:
        if self.max_grad_norm is not None and not self.max_grad_norm > 0:
            raise ConfigError(
                f"max_grad_norm is {self.max_grad_norm}; give a positive number or None"
            )
        if self.non_finite not in ("raise", "skip"):
            raise ConfigError(f"non_finite is {self.non_finite!r}; choose 'raise' or 'skip'")
        if not 0 <= self.lr_scale_ratio < math.inf:
            raise ConfigError(
                f"lr_scale_ratio is {self.lr_scale_ratio}; give 0 (off) or more, such as 1.0 for a "
                "learning rate in proportion to the ranks"
            )
        if self.verify_every is not None and self.verify_every < 0:
            raise ConfigError(
                f"verify_every is {self.verify_every}; give 0 (off) or a number of windows"
            )
        if not 0 < self.timeout_s < math.inf:
            raise ConfigError(f"timeout_s is {self.timeout_s}; give finite seconds above 0")
        for rank, factor in self.emulate_slow.items():
            if not _is_number(factor) or not 1 <= factor < math.inf:
                raise ConfigError(
                    f"emulate_slow slows rank {rank} by {factor!r}; give a finite factor of 1 or "
                    "more"
                )

    def make_cadence(self, world_size: int) -> ElChe:
        """El Che with these settings, for a team of ``world_size`` ranks.

        ``max_batch_diff`` is none of them: it bounds how far ranks are apart in a window, not how
        fast the counts may follow the anchor.

        Raises:
            ConfigError: A number is out of range.
        """
        cadence = ElChe(world_size, ANCHOR if self.anchor is None else self.anchor)
        if self.overhead_target is not None:
            cadence.with_overhead_target(self.overhead_target)
        return cadence.with_max_anchor(self._largest_anchor)

    @property
    def _largest_anchor(self) -> int:
        return MAX_ANCHOR if self.max_anchor is None else self.max_anchor


def _fits(values: object, *, positive: bool) -> bool:
    if isinstance(values, str) or not isinstance(values, Sequence) or not len(values):
        return False
    if not all(_is_number(v) and 0 <= v < math.inf for v in values):
        return False
    return all(values) if positive else any(values)


def _is_by_rank(values: object) -> TypeGuard[Mapping[int, float]]:
    return isinstance(values, Mapping) and all(is_whole(rank) for rank in values)


def _are_buckets(values: object) -> bool:
    if isinstance(values, str) or not isinstance(values, Sequence):
        return False
    return all(
        isinstance(pair, Sequence)
        and len(pair) == 2
        and isinstance(pair[0], str)
        and isinstance(pair[1], Sequence)
        and not isinstance(pair[1], str)
        and all(isinstance(name, str) for name in pair[1])
        for pair in values
    )


def _is_number(value: object) -> bool:
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


def whole_number(name: str, value: object, least: int) -> int:
    """Return the value of a whole-number option as an ``int``; one of NumPy's will do.

    Raises:
        ConfigError: It is not a whole number (``32.0`` is a float), or it is below ``least``.
    """
    if not is_whole(value) or (number := int(value)) < least:
        raise ConfigError(f"{name} is {value!r}; give a whole number from {least}")
    return number
