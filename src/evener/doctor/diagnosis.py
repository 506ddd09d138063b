"""The output of ``evener doctor``: facts in a table, then problems, each with its remedy."""

import io
import json
import shutil
from dataclasses import dataclass
from typing import Any, Final

from rich.console import Console
from rich.table import Table
from rich.text import Text

from evener.comm.addresses import LOOPBACK, parse_address
from evener.doctor.examination import examine_host
from evener.doctor.host_facts import ExchangeTrials, HostFacts, MeasuredLink
from evener.doctor.judgement import Problem, judge_host, judge_pair
from evener.doctor.pair import examine_pair
from evener.errors import CollectiveError, LaunchError
from evener.observe.event_lines import strict_json
from evener.observe.numbers import human_bytes, human_count
from evener.team.nodes import DEFAULT_PORT
from evener.team.terminal import printable

#: Version of the JSON; a later version may have further fields.
FORM: Final = 3

_MEETING: Final = (
    "run `evener doctor --listen ADDR --token-file FILE` on one machine, with an address that the "
    "other one can reach, and `evener doctor ADDR --token-file FILE` on the other; without ADDR it "
    "listens only on loopback. Firewalls must let both connect to each other, on any port"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    """Facts and problems.

    Attributes:
        here: This host.
        there: The other host, if there is one and it has answered.
        link: The link to it.
        problems: The problems that were found.
    """

    here: HostFacts
    there: HostFacts | None = None
    link: MeasuredLink | None = None
    problems: tuple[Problem, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Return everything as values that ``json.dumps`` accepts."""
        document: dict[str, Any] = strict_json(self)
        return {"form": FORM, **document}

    def json_text(self) -> str:
        """Return the JSON as text."""
        return json.dumps(self.to_json(), indent=2, allow_nan=False)

    def for_people(self) -> str:
        """Return a table of the facts, the link, and the problems, for a terminal."""
        table = Table(show_header=self.there is not None)
        hosts = [self.here] if self.there is None else [self.here, self.there]
        for name in ("", "here", "there")[: len(hosts) + 1]:
            table.add_column(name, overflow="fold")
        columns = [_rows(host) for host in hosts]
        for name in dict.fromkeys(name for column in columns for name in column):
            cells = [printable(column.get(name, "–")) for column in columns]
            table.add_row(name, *map(Text, cells))
        text = io.StringIO()
        width = shutil.get_terminal_size((100, 24)).columns
        console = Console(file=text, width=width, color_system=None)
        console.print(table)
        lines = [] if self.link is None else [_describe_link(self.link)]
        for problem in self.problems:
            lines.append(f"problem {problem.where}: {printable(problem.what)}")
            lines.append(f"  remedy: {printable(problem.remedy)}")
        lines = lines if self.problems else [*lines, "no problems found"]
        return text.getvalue() + "\n".join(lines)


def diagnose(address: str | None, token: bytes, *, listens: bool = False) -> Diagnosis:
    """Examine this host; with another machine, also the host there and the link to it.

    Args:
        address: Address of the machine that listens, as ``HOST`` or ``HOST:PORT``. Without it, only
            this host is examined, or it listens on loopback.
        token: The token that both machines must know; empty for none.
        listens: Whether this machine waits for another one.

    Raises:
        ConfigError: ``address`` is invalid, or this machine would listen on it without a token.
    """
    host, port = parse_address(address or LOOPBACK, "ADDR")
    here = examine_host()
    problems = judge_host(here)
    if address is None and not listens:
        return Diagnosis(here=here, problems=tuple(problems))
    there = link = None
    try:
        there, link = examine_pair(host, port or DEFAULT_PORT, here, token, listens=listens)
        problems += [*judge_host(there, "there"), *judge_pair(here, there, link)]
    except (LaunchError, CollectiveError) as error:
        problems.append(Problem("between", str(error), _MEETING))
    return Diagnosis(here=here, there=there, link=link, problems=tuple(problems))


def _describe_link(link: MeasuredLink) -> str:
    return (
        f"link: over {link.backend}, a row takes {1e3 * link.row_s:.2g} ms, "
        f"{human_bytes(link.bytes_per_s_there)}/s there, {human_bytes(link.bytes_per_s_here)}/s "
        f"here ({link.reason})"
    )


def _rows(facts: HostFacts) -> dict[str, str]:
    """Return the cells of a host's column, by row."""
    return {
        "host": f"{facts.host}, {facts.system}",
        "versions": ", ".join(f"{name} {value}" for name, value in facts.versions.items()),
        "torch for": f"{facts.runtime or 'CPU'}{f', NCCL {facts.nccl}' if facts.nccl else ''}",
        **{
            device.name: f"{device.model}"
            f"{f' ({device.architecture})' if device.architecture else ''}"
            f"{f', {_gib(device.memory_bytes)}' if device.memory_bytes else ''}"
            for device in facts.devices
        },
        "exchange": _exchange(facts.exchange),
        "network": ", ".join(facts.addresses) or "loopback alone",
        "limits": f"{_limit(facts.open_files)} open files, {_limit(facts.processes)} processes"
        f"{'' if facts.shm_bytes is None else f'; /dev/shm has {_gib(facts.shm_bytes)}'}",
        "processor": f"{facts.usable_cores} of {facts.cores} cores"
        f"{'' if facts.cpus is None else f' (time of {facts.cpus:g})'}; "
        f"{_gib(facts.free_bytes)} of {_gib(facts.memory_bytes)} free",
    }


def _exchange(trials: ExchangeTrials) -> str:
    tried = {"Gloo": trials.gloo_failure, "shared memory": trials.memory_failure}
    if trials.nccl_tried:
        tried["NCCL"] = trials.nccl_failure
    return ", ".join(f"not {name}" if failure else name for name, failure in tried.items())


def _limit(limit: int | None) -> str:
    return "any number of" if limit is None else human_count(limit)


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.1f} GiB"
