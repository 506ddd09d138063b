"""What ``evener plan`` is asked: a team from a run, from a calibration, or by hand."""

import json
from dataclasses import dataclass, replace
from typing import Final

from evener.config.options import PlanOptions
from evener.errors import ConfigError
from evener.planning.elche import ANCHOR
from evener.planning.speed import CostModel
from evener.simulation.advice import Advice, advise
from evener.simulation.measured_team import MeasuredTeam, read_team
from evener.simulation.prediction import RankSpec, TeamSpec
from evener.simulation.quantities import read_bandwidth, read_count, read_duration, read_speeds
from evener.simulation.simulated_rank import BYTES_PER_PARAMETER, Link
from evener.simulation.telling import document, text

BATCH_SIZE: Final = 32
"""Samples of an optimizer step unless told otherwise, as in a run without the key."""

LATENCY_S: Final = 1e-4
"""Seconds until a message arrives unless told otherwise, as in a local network."""

_MOST_RATIO: Final = 1000
"""Ranks that are further apart are not simulated: windows of local steps would have too many."""

_FLOP_PER_WEIGHT: Final = 6
"""Floating-point operations of a parameter for each token, forward and backward."""


@dataclass(frozen=True, slots=True)
class PlanAnswer:
    """What ``evener plan`` has found out.

    Attributes:
        asked: The team, and where it comes from.
        advice: What to do with it.
    """

    asked: MeasuredTeam
    advice: Advice

    def to_text(self) -> str:
        """Return it for people."""
        return text(self.asked.team, self.advice, self.asked.source, self.asked.notes)

    def to_json(self) -> str:
        """Return it for programs."""
        told = document(self.asked.team, self.advice, self.asked.source, self.asked.notes)
        return json.dumps(told, allow_nan=False) + "\n"


def answer_plan(options: PlanOptions, calibrated: MeasuredTeam | None = None) -> PlanAnswer:
    """Predict what a team would do.

    Args:
        options: What is asked.
        calibrated: The team that a calibration has found, with ``options.calibrate``.

    Raises:
        ConfigError: An option is wrong, or contradicts another; or the run tells too little.
    """
    check_options(options)
    asked = _asked(options) if calibrated is None else calibrated
    changed = _with_options(asked, options)
    _refuse_far_apart(changed.team)
    return PlanAnswer(changed, advise(changed.team))


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


def calibrated_team(options: PlanOptions, speeds: dict[str, float]) -> MeasuredTeam:
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
    team = _team_of([(f"rank {r} ({n})", s) for r, (n, s) in enumerate(named.items())])
    note = (
        "matrix products alone were timed, of which training reaches a part: trust how devices "
        "compare, and plan again with the folder of a run"
    )
    return MeasuredTeam(team, "a calibration of this machine", (note,))


def _asked(options: PlanOptions) -> MeasuredTeam:
    if options.run is not None:
        return read_team(options.run)
    assert options.speeds is not None
    speeds = read_speeds("--speeds", options.speeds)
    team = _team_of([(f"rank {rank}", speed) for rank, speed in enumerate(speeds)])
    return MeasuredTeam(team, "the command line")


def _team_of(speeds: list[tuple[str, float]]) -> TeamSpec:
    """Return a team of names and samples per second, whose exchanges cost nothing."""
    return TeamSpec(
        ranks=tuple(RankSpec(name=name, cost=CostModel(0.0, 1.0 / s)) for name, s in speeds),
        link=Link(),
        batch_size=BATCH_SIZE,
        local_batch_size=BATCH_SIZE,
        anchor=ANCHOR,
    )


def _with_options(asked: MeasuredTeam, options: PlanOptions) -> MeasuredTeam:
    """Return the team as the options change it."""
    team, notes = asked.team, list(asked.notes)
    ranks = list(team.ranks)
    if options.add is not None:
        for speed in read_speeds("--add", options.add):
            name = f"rank {len(ranks)} (added)"
            ranks.append(RankSpec(name=name, cost=CostModel(0.0, 1.0 / speed)))
    size = options.batch_size or team.batch_size
    default_local = team.local_batch_size if options.batch_size is None else size
    link = _link(team.link, options)
    if options.params is not None:
        notes = [note for note in notes if "--params" not in note]
    if options.bandwidth is not None:
        notes = [note for note in notes if "--bandwidth" not in note]
    elif link.transfer_s == 0.0 and options.run is None:
        notes.append("exchanges are taken to cost nothing: give --params and --bandwidth")
    team = replace(
        team,
        ranks=tuple(ranks),
        link=link,
        batch_size=size,
        local_batch_size=options.local_batch_size or default_local,
        micro_batch_size=options.micro_batch_size or team.micro_batch_size,
        anchor=options.anchor or team.anchor,
    )
    return replace(asked, team=team, notes=tuple(notes))


def _refuse_far_apart(team: TeamSpec) -> None:
    """Refuse ranks that do hardly anything while another does a step."""
    alone = [rank.alone(team.batch_size, team.micro_batch_size) for rank in team.ranks]
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
