"""The question to ``evener plan``: a team from a run or from given speeds, and what changes."""

from dataclasses import replace
from typing import Final

from evener.config.options import PlanOptions
from evener.errors import ConfigError
from evener.planning.speed import CostModel
from evener.simulation.measured_team import read_team
from evener.simulation.prediction import TeamSpec
from evener.simulation.simulated_rank import BYTES_PER_PARAMETER, Link, SimulatedRank
from evener.simulation.team_advice import TeamAdvice, advise

BATCH_SIZE: Final = 32
"""Default samples of an optimizer step, as in a run without the key."""

LATENCY_MS: Final = 0.1
"""Default milliseconds until a message arrives, as in a local network."""

_LEAST_SPEED, _MOST_SPEED = 1e-9, 1e15
_MOST_RATIO: Final = 1000
"""Largest ratio of speeds that is simulated: beyond it, windows have too many local steps."""


def answer_plan(options: PlanOptions) -> TeamAdvice:
    """Predict a team, and advise.

    Raises:
        ConfigError: An option is wrong, or contradicts another; or the run has too few windows.
    """
    if (options.run is None) == (options.speeds is None):
        raise ConfigError(
            "give the folder of a run or --speeds such as 120,48 (samples per second of each rank "
            "alone), and not both"
        )
    team = _team(options)
    alone = [rank.alone(team.batch_size) for rank in team.ranks]
    fast, slow = alone.index(max(alone)), alone.index(min(alone))
    if alone[fast] > _MOST_RATIO * alone[slow]:
        raise ConfigError(
            f"{team.ranks[slow].name} does {alone[slow]:.3g} samples/s, {team.ranks[fast].name} "
            f"{alone[fast]:.3g}: it adds less than {1 / _MOST_RATIO:.1%}, so leave it out"
        )
    return advise(team)


def _team(options: PlanOptions) -> TeamSpec:
    """Return the team that the options describe."""
    team = TeamSpec(
        ranks=(),
        link=Link(),
        batch_size=BATCH_SIZE,
        source="the command line",
    )
    if options.run is not None:
        team = read_team(options.run)
    ranks = list(team.ranks)
    for speed in _speeds("--speeds", options.speeds):
        ranks.append(SimulatedRank(CostModel(0.0, 1.0 / speed), name=f"rank {len(ranks)}"))
    for speed in _speeds("--add", options.add):
        ranks.append(SimulatedRank(CostModel(0.0, 1.0 / speed), name=f"rank {len(ranks)} (added)"))
    link = _link(team.link, options)
    given = [name for name in ("params", "bandwidth") if getattr(options, name) is not None]
    notes = [note for note in team.notes if not any(f"--{name}" in note for name in given)]
    if options.run is None and options.bandwidth is None and len(ranks) > 1:
        missing = "--bandwidth" if link.num_bytes else "--params and --bandwidth"
        notes.append(f"exchanges are assumed to cost nothing: give {missing}")
    size = options.batch_size
    measured = team.local_batch_size if size is None else None
    micro_batch_size = options.micro_batch_size or ranks[0].micro_batch_size
    return replace(
        team,
        ranks=tuple(replace(rank, micro_batch_size=micro_batch_size) for rank in ranks),
        link=link,
        batch_size=size or team.batch_size,
        local_batch_size=options.local_batch_size or measured,
        anchor=options.anchor or team.anchor,
        notes=tuple(notes),
    )


def _speeds(option: str, text: str | None) -> list[float]:
    try:
        speeds = [float(part) for part in text.split(",")] if text is not None else []
    except ValueError:
        speeds = [0.0]
    if not all(_LEAST_SPEED <= speed <= _MOST_SPEED for speed in speeds):
        raise ConfigError(
            f"{option} is {text!r}; give samples per second of each rank alone, above 0 and with "
            "commas between them, such as 120,48"
        )
    return speeds


def _link(link: Link, options: PlanOptions) -> Link:
    """Return a link with the values of the options; the rest is as measured."""
    if options.params is not None:
        link = replace(link, num_bytes=round(BYTES_PER_PARAMETER * options.params))
    if options.bandwidth is None:
        if options.latency is not None:
            raise ConfigError("--latency is given without --bandwidth; give both")
        return link
    if not link.num_bytes:
        raise ConfigError(
            f"--bandwidth is {options.bandwidth:g}, but the size of an exchange is not known; give "
            "--params, such as 350e6"
        )
    transfer_s = 8 * link.num_bytes / (1e9 * options.bandwidth)
    latency_s = (LATENCY_MS if options.latency is None else options.latency) / 1000
    return replace(link, transfer_s=transfer_s, latency_s=latency_s, meeting_s=latency_s)
