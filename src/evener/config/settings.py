"""Options of training, each declared once: arguments, YAML, builder and command line share them."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import field, fields, replace
from typing import Annotated, Any, Final, Literal, Self

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    StrictStr,
    model_validator,
)

from evener.config.checks import (
    AboveZero,
    Beta,
    NotBelowZero,
    NotNegativeInt,
    Number,
    PositiveInt,
    asks_for,
    checked,
    is_number,
    is_whole,
    whole_number,
)
from evener.errors import ConfigError
from evener.planning.cadence import CadencePolicy
from evener.planning.elche import ANCHOR, LEAST_OVERHEAD, MAX_ANCHOR, MOST_OVERHEAD, ElChe
from evener.planning.guard import LEAST_FACTOR, DivergenceGuard, make_guard
from evener.planning.policies import ApplyPolicy, Policy
from evener.planning.sync import FixedShares, SyncPolicy


def _not_all_zero(shares: Sequence[float]) -> Sequence[float]:
    if not any(shares):
        raise ValueError("give one rank a number above 0")
    return shares


def hint_forms(slow_rank: object, ratio: object) -> str:
    """Return the equivalent of floDl's ``speed_hint(slow_rank, ratio)``, for a message."""
    return (
        "floDl reads these as (slow_rank, ratio), evener as speeds by rank; give "
        f"DdpConfig().with_speed_hint({slow_rank!r}, {ratio!r}) if rank {slow_rank!r} is {ratio!r} "
        f"times slower than the others, or the speed of rank {slow_rank!r}: "
        f"{{{slow_rank!r}: {ratio!r}}}"
    )


def _not_in_the_form_of_flodl(hint: object) -> object:
    if isinstance(hint, Sequence) and len(hint) == 2:
        first, second = hint
        # Two speeds are those of a team of two, whose ranks are 0 and 1.
        if is_whole(first) and first in (0, 1) and is_number(second) and second > 1:
            raise ValueError(hint_forms(first, second))
    return hint


_SpeedHint = Annotated[
    Annotated[Sequence[AboveZero] | Mapping[NotNegativeInt, AboveZero], Field(min_length=1)] | None,
    asks_for(
        "give a finite number above 0 for each rank, relative to one another, such as [1, 0.33], "
        "or by rank: {1: 0.33}"
    ),
    BeforeValidator(_not_in_the_form_of_flodl),
]


def _as_word(switch: object) -> object:
    """Return the word that was written: YAML reads ``on`` and ``off`` as booleans."""
    return {True: "on", False: "off"}[switch] if isinstance(switch, bool) else switch


@checked
class LocalOptions:
    """Options that have an effect only in CADENCE and ASYNC, where ranks make local steps.

    Attributes:
        anchor: Local steps of the slowest rank in a window, to start from; 10 if left out.
        overhead_target: Fraction of the time that averaging may take before the anchor grows, from
            0.01 to 0.50; 0.10 if left out.
        max_anchor: Largest anchor; with 0 it does not grow. 200 if left out.
        max_batch_diff: Most local steps by which a rank may be ahead of another in a window; 0 is
            lockstep, ``None`` no limit. With a limit, ranks wait for a rank that becomes slow.
        divergence_guard: ``"level"`` stops the anchor from growing after the ranks' divergence has
            risen three times in a row, and halves it while the divergence is above ten times
            ``divergence_threshold``. ``"none"``, ``None`` or ``False`` turns the guard off. A
            ``DivergenceGuard`` of your own is also accepted.
        divergence_threshold: Divergence, relative to the norm of the parameters, below which
            ``"level"`` does nothing; 0.05 if left out.
        divergence_factor: ``"level"`` multiplies the anchor by it, also from the fourth rise in a
            row on: from 0.1 to below 1, such as 0.5. If left out, rising divergences alone do not
            lower the anchor.
        lr_scale_ratio: Multiplies the learning rate by ``1 + (world_size - 1) * lr_scale_ratio``; 0
            leaves it as it is.
        outer: How the average difference from the consensus is applied: ``"average"`` adds it;
            ``"nesterov"`` uses it as a gradient of SGD with Nesterov momentum, as DiLoCo and SlowMo
            do. From Python also a function that makes an optimizer of a list of parameters, such
            as a class of ``torch.optim``. Its state is part of checkpoints; after a resume with
            another class it starts empty. Windows with fewer than half of the anchor's steps are
            averaged.
        outer_lr: Learning rate of ``"nesterov"``; ``"auto"`` is 1 with more than 5 ranks or an
            anchor above 128, else 0.7, by measurement.
        outer_momentum: Momentum of ``"nesterov"``; 0.5 if left out.
    """

    anchor: PositiveInt | None = None
    overhead_target: Annotated[Number, Field(ge=LEAST_OVERHEAD, le=MOST_OVERHEAD)] | None = None
    max_anchor: NotNegativeInt | None = None
    max_batch_diff: NotNegativeInt | None = None
    divergence_guard: Annotated[
        str | bool | DivergenceGuard | None,
        BeforeValidator(lambda guard: make_guard(guard) and guard),
    ] = "level"
    divergence_threshold: AboveZero | None = None
    divergence_factor: Annotated[Number, Field(ge=LEAST_FACTOR, lt=1)] | None = None
    lr_scale_ratio: NotBelowZero = 0.0
    outer: Annotated[
        Literal["average", "nesterov"] | Callable[..., Any],
        asks_for("choose 'average' or 'nesterov', or give a function that makes an optimizer"),
    ] = "average"
    outer_lr: Annotated[
        AboveZero | Literal["auto"], asks_for("give a number above 0, or 'auto'")
    ] = "auto"
    outer_momentum: Beta | None = None

    @model_validator(mode="after")
    def _outer_options_are_of_nesterov(self) -> Self:
        for name in ("outer_lr", "outer_momentum"):
            value = getattr(self, name)
            if self.outer != "nesterov" and value not in (None, "auto"):
                raise ValueError(
                    f"{name} is {value!r}, but outer is {self.outer!r}, which has no such number; "
                    "leave it out, or set outer to 'nesterov'"
                )
        return self

    @model_validator(mode="after")
    def _starts_below_the_largest(self) -> Self:
        if self.anchor is not None and 0 < self._largest_anchor < self.anchor:
            raise ValueError(
                f"anchor is {self.anchor}, above max_anchor ({self._largest_anchor}); lower it, or "
                "raise max_anchor"
            )
        return self

    def make_cadence(self, world_size: int) -> ElChe:
        """Return El Che with these settings, for a team of ``world_size`` ranks.

        ``max_batch_diff`` is not among them: it limits how far ranks are apart in a window, not how
        fast the counts may follow the anchor.
        """
        cadence = ElChe(world_size, self.anchor or ANCHOR).with_max_anchor(self._largest_anchor)
        if self.overhead_target is not None:
            cadence.with_overhead_target(self.overhead_target)
        return cadence

    @property
    def _largest_anchor(self) -> int:
        return MAX_ANCHOR if self.max_anchor is None else self.max_anchor


#: Options that have an effect only if ranks make local steps.
LOCAL_OPTIONS: Final = tuple(option.name for option in fields(LocalOptions))


@checked
class TrainingOptions(LocalOptions):
    """Options that are the same in ``DdpConfig``, a builder, and the YAML of every task.

    Attributes:
        max_grad_norm: Clip the averaged gradient to this 2-norm; ``None`` does not clip. If left
            out, ``None`` in a loop of your own, and 1.0 in ``evener pretrain`` and ``classify``.
        non_finite: ``"raise"`` stops every rank on a non-finite loss or gradient; ``"skip"``
            skips the window on every rank.
        speed_hint: Relative speeds of the ranks, a larger number for a faster rank: one for each
            rank, such as ``(1.0, 0.33)``, or by rank, such as ``{1: 0.33}``; ranks that are not
            named have speed 1. ``with_speed_hint`` takes how slow a rank is instead. A pair of 0 or
            1 and a larger number, such as ``(1, 2.3)``, is refused: floDl reads it as a rank and
            how slow that is. ``(1.0, 2.3)`` are speeds.
            Replaces the calibration before the first window. If measurements contradict it, a
            warning is printed.
        partition_ratios: Relative shares of the ranks, the same in every window; replaces planning
            altogether. A rank with 0 has no share.
        verify_every: Number of windows after which the parameters and averaged buffers of all ranks
            are compared by hashes; also compared at the end of an epoch, before a checkpoint and on
            leaving. ``ReplicasDifferError`` is raised if they differ; 0 does not compare. In
            CADENCE and ASYNC the consensus is compared, when the next window is exchanged or the
            epoch ends. If left out, 0, and 1 in a ``DistributedTrainer``.
        sharded_update: In SYNC, ``"on"`` divides the update among ranks: each updates its part of
            the parameters and keeps the optimizer state of that part only. ``"off"`` repeats the
            update on every rank; ``"auto"`` divides it if ranks exchange over shared memory or
            NCCL, the optimizers are elementwise ones of ``torch.optim``, and half a million
            elements or more are trainable.
        overlap: In SYNC, ``"on"`` exchanges gradients while backward computes those of other
            layers, ``"off"`` after backward. ``"auto"`` times the link before the first window
            and backward in it, and chooses what is faster over sockets; inside one host and on GPUs
            it is ``"off"``. A sharded update never overlaps.
        wire: Number format in which gradients travel between hosts (in CADENCE and ASYNC,
            differences of parameters): ``"float32"``, or ``"bfloat16"``, half the bytes; in CADENCE
            and ASYNC also ``"int8"`` and ``"int4"``, with a scale for every 128 numbers. They are
            summed in float32, and the rounding error of one exchange is added to the next. Without
            effect over shared memory and NCCL, in a sharded update, and on other dtypes.
        timeout_s: Longest wait for another rank, in seconds.
    """

    max_grad_norm: AboveZero | None = None
    non_finite: Literal["raise", "skip"] = "raise"
    speed_hint: _SpeedHint = None
    partition_ratios: Annotated[Sequence[NotBelowZero], AfterValidator(_not_all_zero)] | None = None
    verify_every: NotNegativeInt | None = None
    sharded_update: Annotated[Literal["auto", "on", "off"], BeforeValidator(_as_word)] = "auto"
    overlap: Annotated[Literal["auto", "on", "off"], BeforeValidator(_as_word)] = "auto"
    wire: Literal["float32", "bfloat16", "int8", "int4"] = "float32"
    timeout_s: AboveZero = 600.0

    @model_validator(mode="after")
    def _hint_or_ratios(self) -> Self:
        if self.speed_hint and self.partition_ratios is not None:
            raise ValueError(
                f"speed_hint is {self.speed_hint!r} and partition_ratios "
                f"{self.partition_ratios!r}; fixed shares need no speeds: give one of them"
            )
        return self


@checked
class DdpConfig(TrainingOptions):
    """Options of ``Ddp.setup`` beyond its arguments.

    They are those of ``TrainingOptions`` and ``LocalOptions``, and the following. Options that have
    an effect only in CADENCE and ASYNC are refused with policy ``"sync"``.

    Attributes:
        gradient_buckets: SYNC: labels with names of parameters, such as
            ``[("block 1", ["1.weight", "1.bias"]), ("block 0", ["0.weight"])]``: gradients are
            exchanged in that order, those of a bucket at once, and parameters in no bucket last.
            ``None`` exchanges all at once. So does a sharded update, whose ranks each need the sums
            of one part only: with ``sharded_update="off"`` buckets are used everywhere.
        emulate_slow: Factor per rank by which to slow it on purpose, such as ``{1: 3.0}``.
        stop_when: Function that is called after each micro-batch; if it returns true, the team
            stops and drops the window that is being computed.
        quiet: Do not print the team to stderr; warnings are always printed.

    Raises:
        ConfigError: An option is unknown or out of range, or two exclude one another.
    """

    gradient_buckets: Sequence[tuple[StrictStr, Sequence[StrictStr]]] | None = None
    emulate_slow: Mapping[NotNegativeInt, Annotated[Number, Field(ge=1)]] = field(
        default_factory=dict
    )
    stop_when: Callable[[], bool] | None = None
    quiet: bool = False

    def with_speed_hint(self, slow_rank: int, ratio: float) -> Self:
        """Return a copy in which one rank is assumed slower than all others until it is measured.

        Args:
            slow_rank: The slow rank.
            ratio: How many times as fast the others are; 1 or more.

        Raises:
            ConfigError: A number is out of range.
        """
        whole_number("slow_rank", slow_rank, 0)
        if not is_number(ratio) or not 1 <= ratio < math.inf:
            raise ConfigError(
                f"ratio is {ratio!r}; give how many times as fast the other ranks are as rank "
                f"{slow_rank}: a finite number of 1 or more"
            )
        return replace(self, speed_hint={slow_rank: 1.0 / ratio})

    def hinted_speeds(self, world_size: int) -> tuple[float, ...] | None:
        """Return the speeds of ``speed_hint`` by rank, if there is one."""
        if not self.speed_hint:
            return None
        if isinstance(self.speed_hint, Mapping):
            return tuple(self.speed_hint.get(rank, 1.0) for rank in range(world_size))
        return tuple(self.speed_hint)

    def make_policy(self, members: Sequence[str], *, avoid_ones: bool) -> Policy:
        """Return what plans the windows of SYNC with these settings.

        Args:
            members: Member ids, by rank.
            avoid_ones: Avoid micro-batches of one sample if possible.
        """
        if self.partition_ratios is not None:
            return FixedShares(members, self.partition_ratios, avoid_ones=avoid_ones)
        policy = SyncPolicy(members, [None] * len(members), avoid_ones=avoid_ones)
        if speeds := self.hinted_speeds(len(members)):
            policy.calibrate(speeds)
        return policy

    def make_cadence_policy(self, members: Sequence[str], way: ApplyPolicy) -> CadencePolicy:
        """Return what plans windows of local steps with these settings.

        Args:
            members: Member ids, by rank.
            way: The policy of the run.
        """
        cadence = self.make_cadence(len(members))
        if speeds := self.hinted_speeds(len(members)):
            cadence.with_speeds(speeds)
        return CadencePolicy(
            members,
            cadence,
            make_guard(self.divergence_guard, self.divergence_threshold, self.divergence_factor),
            max_batch_diff=self.max_batch_diff,
            way=way,
        )

    def check_policy(self, policy: ApplyPolicy) -> None:
        """Refuse options that were given and have no effect with the policy.

        Raises:
            ConfigError: Names the first one and the remedy.
        """
        if policy is ApplyPolicy.SYNC:
            defaults = {option.name: option.default for option in fields(LocalOptions)}
            given = [name for name in defaults if getattr(self, name) != defaults[name]]
            other = "'cadence' or 'async'"
        else:
            given, other = self._fixed_shares(), "'sync'"
        if policy is ApplyPolicy.SYNC and self.wire.startswith("int"):
            raise ConfigError(
                f"wire is {self.wire!r}, which is too coarse for the gradients of policy 'sync'; "
                "give 'bfloat16' or 'float32', or use policy 'cadence' or 'async'"
            )
        for name in given:
            raise ConfigError(
                f"{name} is {getattr(self, name)!r}, but has no effect with policy "
                f"{policy.value!r}; leave it out, or use policy {other}"
            )

    def check_elastic(self) -> None:
        """Refuse options that need a fixed team.

        Raises:
            ConfigError: Names the first one and the remedy.
        """
        for name in [*self._fixed_shares(), *(["lr_scale_ratio"] if self.lr_scale_ratio else [])]:
            raise ConfigError(
                f"{name} is {getattr(self, name)!r}, but the ranks of an elastic team change; "
                "leave it out, or use a fixed team"
            )

    def _fixed_shares(self) -> list[str]:
        """Return the given options that need SYNC and a fixed team."""
        given = {
            "sharded_update": self.sharded_update == "on",
            "partition_ratios": self.partition_ratios is not None,
        }
        return [name for name, is_given in given.items() if is_given]

    def check_team(self, world_size: int) -> None:
        """Refuse options that name ranks that do not exist; on every rank.

        Raises:
            ConfigError: Not one number for each rank, or a rank that the team does not have.
        """
        for name in ("speed_hint", "partition_ratios", "emulate_slow"):
            values = getattr(self, name)
            if isinstance(values, Mapping):
                fits = all(rank < world_size for rank in values)
            else:
                fits = values is None or len(values) == world_size
            if not fits:
                raise ConfigError(
                    f"{name} is {values!r}, but the team has {world_size} ranks, numbered from 0; "
                    "give one number for each, or name ranks that it has"
                )
