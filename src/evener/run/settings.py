"""Options of ``Ddp.setup`` beyond its arguments."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from evener.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class DdpConfig:
    """Options of ``Ddp.setup`` beyond its arguments.

    Attributes:
        max_grad_norm: Clip the averaged gradient to this 2-norm; ``None`` does not clip.
        non_finite: ``"raise"`` stops every rank on a non-finite loss or gradient; ``"skip"``
            leaves the window out on every rank.
        speed_hint: Speeds of the ranks relative to one another, such as ``(1.0, 0.33)``; replaces
            the timing before the first window.
        partition_ratios: Shares of the ranks relative to one another, the same in every window;
            replaces planning altogether. 0 gives a rank nothing to do.
        timeout_s: Longest wait for another rank, in seconds.
        emulate_slow: Factor per rank by which to slow it on purpose, such as ``{1: 3.0}``.
        stop_when: Asked after each micro-batch; when it returns true the team stops, dropping the
            window that is being computed.
        quiet: Do not print the team to stderr.
    """

    max_grad_norm: float | None = None
    non_finite: Literal["raise", "skip"] = "raise"
    speed_hint: Sequence[float] | None = None
    partition_ratios: Sequence[float] | None = None
    timeout_s: float = 600.0
    emulate_slow: Mapping[int, float] = field(default_factory=dict)
    stop_when: Callable[[], bool] | None = None
    quiet: bool = False

    def __post_init__(self) -> None:
        if self.max_grad_norm is not None and not self.max_grad_norm > 0:
            raise ConfigError(
                f"max_grad_norm is {self.max_grad_norm}; give a positive number or None"
            )
        if self.non_finite not in ("raise", "skip"):
            raise ConfigError(f"non_finite is {self.non_finite!r}; choose 'raise' or 'skip'")
        if self.speed_hint is not None and not all(s > 0 for s in self.speed_hint):
            raise ConfigError(
                f"speed_hint is {self.speed_hint}; give a speed above 0 for each rank, relative to "
                "one another"
            )
        if not self.timeout_s > 0:
            raise ConfigError(f"timeout_s is {self.timeout_s}; give seconds above 0")
