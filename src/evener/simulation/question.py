"""The question to ``evener plan``: a team from a run, from a calibration, or by hand."""

from collections.abc import Iterable
from dataclasses import replace
from typing import Final

from evener.config.options import PlanOptions
from evener.errors import ConfigError
from evener.planning.speed import CostModel
from evener.simulation.advice import Advice, advise
from evener.simulation.measured_team import read_team
from evener.simulation.prediction import TeamSpec
from evener.simulation.quantities import read_bandwidth, read_count, read_duration, read_speeds
from evener.simulation.simulated_rank import BYTES_PER_PARAMETER, Link, SimulatedRank

BATCH_SIZE: Final = 32
"""Samples of an optimizer step unless told otherwise, as in a run without the key."""

LATENCY_S: Final = 1e-4
"""Seconds until a message arrives unless told otherwise, as in a local network."""

_MOST_RATIO: Final = 1000
"""Ranks that are further apart are not simulated: windows of local steps would have too many."""

_MOST_SAMPLES: Final = 10**9
_MOST_ANCHOR: Final = 10_000
"""Nor are larger batches and windows, such as those of a damaged run: they would take long."""

_FLOP_PER_WEIGHT: Final = 6
"""Floating-point operations of a parameter for each token, forward and backward."""


def answer_plan(options: PlanOptions, calibrated: TeamSpec | None = None) -> Advice:
    """Predict what a team would do.

    Args:
        options: What is asked.
        calibrated: The team that a calibration has found, with ``options.calibrate``.

    Raises:
        ConfigError: An option is wrong, or contradicts another; or the run tells too little.
    """
    check_options(options)
    team = _with_options(calibrated or _asked(options), options)
    _refuse_endless(team)
    return advise(team)


def check_options(options: PlanOptions) -> None:
    """Refuse what cannot be meant.

    Raises:
        ConfigError: Names the option.
    """
    sources = {
        "RUN": options.run is not None,
        "--speeds": options.speeds is not None,
        "--calibrate": options.calibrate,
    }
    given = [name for name, is_given in sources.items() if is_given]
    if len(given) != 1:
        told = f"{' and '.join(given)} are given" if given else "nothing says how fast ranks are"
        raise ConfigError(
            f"{told}; give one of these: the folder of a run, --speeds such as 120,48 (samples per "
            "second), or --calibrate"
        )
    numbers = {
        "--tokens": options.tokens,
        "--batch-size": options.batch_size,
        "--local-batch-size": options.local_batch_size,
        "--micro-batch-size": options.micro_batch_size,
        "--anchor": options.anchor,
    }
    for name, number in numbers.items():
        if number is not None and number < 1:
            raise ConfigError(f"{name} is {number}; give 1 or more")
    if options.tokens is not None and not options.calibrate:
        raise ConfigError("--tokens says what a sample is to a calibration; give --calibrate, too")
    if options.calibrate and (options.params is None or options.tokens is None):
        raise ConfigError(
            "--calibrate times matrix products, so it must know how many a sample takes; give "
            "--params such as 350M, and --tokens of a sample such as 1024"
        )


def calibrated_team(options: PlanOptions, speeds: dict[str, float]) -> TeamSpec:
    """Return the team of devices that have been timed.

    Args:
        options: With ``params`` and ``tokens``.
        speeds: Floating-point operations per second by device.

    Raises:
        ConfigError: ``params`` is not a number.
    """
    assert options.params is not None
    assert options.tokens is not None
    flop = _FLOP_PER_WEIGHT * read_count("--params", options.params) * options.tokens
    named = {name: speed / flop for name, speed in speeds.items()}
    note = (
        "matrix products alone were timed, of which training reaches a part: trust how devices "
        "compare, and plan again with the folder of a run"
    )
    team = _team_of([f"rank {rank} ({name})" for rank, name in enumerate(named)], named.values())
    return replace(team, source="a calibration of this machine", notes=(note,))


def _asked(options: PlanOptions) -> TeamSpec:
    if options.run is not None:
        return read_team(options.run)
    assert options.speeds is not None
    speeds = read_speeds("--speeds", options.speeds)
    return _team_of([f"rank {rank}" for rank in range(len(speeds))], speeds)


def _team_of(names: Iterable[str], speeds: Iterable[float]) -> TeamSpec:
    """Return a team of so many samples per second, whose exchanges cost nothing."""
    return TeamSpec(
        ranks=tuple(map(_rank_of, names, speeds)),
        link=Link(),
        batch_size=BATCH_SIZE,
        local_batch_size=BATCH_SIZE,
        source="the command line",
    )


def _rank_of(name: str, speed: float) -> SimulatedRank:
    return SimulatedRank(CostModel(0.0, 1.0 / speed), name=name)


def _with_options(team: TeamSpec, options: PlanOptions) -> TeamSpec:
    """Return the team as the options change it."""
    notes, ranks = list(team.notes), list(team.ranks)
    micro_batch_size = options.micro_batch_size or ranks[0].micro_batch_size
    if options.add is not None:
        for speed in read_speeds("--add", options.add):
            ranks.append(_rank_of(f"rank {len(ranks)} (added)", speed))
    size = options.batch_size or team.batch_size
    default_local = team.local_batch_size if options.batch_size is None else size
    link = _link(team.link, options)
    if options.params is not None:
        notes = [note for note in notes if "--params" not in note]
    if options.bandwidth is not None:
        notes = [note for note in notes if "--bandwidth" not in note]
    elif options.run is None and len(ranks) > 1:
        missing = "--bandwidth" if link.num_bytes else "--params and --bandwidth"
        notes.append(f"exchanges are taken to cost nothing: give {missing}")
    return replace(
        team,
        ranks=tuple(replace(rank, micro_batch_size=micro_batch_size) for rank in ranks),
        link=link,
        batch_size=size,
        local_batch_size=options.local_batch_size or default_local,
        anchor=options.anchor or team.anchor,
        notes=tuple(notes),
    )


def _refuse_endless(team: TeamSpec) -> None:
    """Refuse a team whose simulation would take very long."""
    for option, number, most in (
        ("--batch-size", team.batch_size, _MOST_SAMPLES),
        ("--local-batch-size", team.local_batch_size, _MOST_SAMPLES),
        ("--anchor", team.anchor, _MOST_ANCHOR),
    ):
        if number > most:
            raise ConfigError(f"{option} would be {number:,}; give {most:,} at most")
    alone = [rank.alone(team.batch_size) for rank in team.ranks]
    fast, slow = alone.index(max(alone)), alone.index(min(alone))
    if alone[fast] > _MOST_RATIO * alone[slow]:
        raise ConfigError(
            f"{team.ranks[slow].name} does {alone[slow]:.3g} samples/s, {team.ranks[fast].name} "
            f"{alone[fast]:.3g}: it adds less than {1 / _MOST_RATIO:.1%}, so leave it out"
        )


def _link(link: Link, options: PlanOptions) -> Link:
    """Return a link as the options say; what they do not say is as measured."""
    if options.params is not None:
        params = read_count("--params", options.params)
        link = replace(link, num_bytes=BYTES_PER_PARAMETER * params)
    if options.bandwidth is None:
        if options.latency is not None:
            raise ConfigError("--latency is given without --bandwidth; give both")
        return link
    bytes_per_s = read_bandwidth("--bandwidth", options.bandwidth)
    if not link.num_bytes:
        raise ConfigError(
            f"--bandwidth is {options.bandwidth}, but nothing says how much is exchanged; give "
            "--params, such as 350M"
        )
    latency_s = LATENCY_S
    if options.latency is not None:
        latency_s = read_duration("--latency", options.latency)
    return Link(link.num_bytes, link.num_bytes / bytes_per_s, latency_s, latency_s)
