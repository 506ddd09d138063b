"""The output of ``evener doctor``: facts in a table, then problems, each with its remedy."""

import io
import json
import shutil
from dataclasses import dataclass
from typing import Any, Final

from rich.console import Console
from rich.table import Table
from rich.text import Text

from evener.doctor.asking import ask
from evener.doctor.examination import examine_host
from evener.doctor.host_facts import HostFacts, MeasuredLink
from evener.doctor.judgement import Problem, judge_host, judge_pair
from evener.observe.event_lines import strict_json
from evener.observe.numbers import human_bytes, human_count, human_duration
from evener.team.terminal import printable

#: Number of the JSON's form; a later form may have more fields, not others.
FORM: Final = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    """Facts and problems.

    Attributes:
        here: This host.
        there: The other host, if one was asked and told.
        link: To it.
        problems: What is wrong.
    """

    here: HostFacts
    there: HostFacts | None = None
    link: MeasuredLink | None = None
    problems: tuple[Problem, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Return all of it, as values that ``json.dumps`` accepts."""
        document: dict[str, Any] = strict_json(self)
        return {"form": FORM, **document}

    def json_text(self) -> str:
        """Return the JSON for programs."""
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


def diagnose(address: str | None, token: bytes) -> Diagnosis:
    """Examine this host; with an address, also the host there and the link to it.

    Args:
        address: Where ``evener doctor --listen`` runs; ``None`` for this host alone.
        token: What both must know; empty for none.

    Raises:
        ConfigError: ``address`` is not an address.
    """
    if address is None:
        here = examine_host()
        return Diagnosis(here=here, problems=tuple(judge_host(here)))
    reply = ask(address, token)  # first, so that a wrong address is reported at once
    here = examine_host()
    problems = judge_host(here)
    if reply.failure is not None:
        problems.append(reply.failure)
    if reply.facts is not None and reply.link is not None:
        problems += judge_host(reply.facts, "there")
        problems += judge_pair(here, reply.facts, reply.link)
    return Diagnosis(here=here, there=reply.facts, link=reply.link, problems=tuple(problems))


def _describe_link(link: MeasuredLink) -> str:
    side = "ahead" if link.clock_ahead_s >= 0 else "behind"
    return (
        f"link: {1e3 * link.round_trip_s:.2g} ms there and back, "
        f"{human_bytes(link.bytes_per_s_there)}/s there, {human_bytes(link.bytes_per_s_here)}/s "
        f"here; the clock there is {human_duration(abs(link.clock_ahead_s))} {side} "
        f"(± {1e3 * link.clock_error_s:.2g} ms)"
    )


def _rows(facts: HostFacts) -> dict[str, str]:
    """Return the cells of a host's column, by row."""
    extras = {name: all(found.values()) for name, found in facts.extras.items()}
    build, network, limits = facts.build, facts.network, facts.limits
    return {
        "host": f"{facts.host}, {facts.system}",
        "versions": ", ".join(f"{name} {value}" for name, value in facts.versions.items()),
        "extras": _either([n for n in extras if extras[n]], [n for n in extras if not extras[n]]),
        "torch for": f"{build.runtime or 'CPU'}{f', NCCL {build.nccl}' if build.nccl else ''}",
        **{
            device.name: f"{device.model}"
            f"{f' ({device.architecture})' if device.architecture else ''}"
            f"{f', {_gib(device.memory_bytes)}' if device.memory_bytes else ''}"
            for device in facts.devices
        },
        "exchange": _exchange(facts),
        "network": f"{', '.join(network.addresses) or 'loopback alone'}; port "
        f"{network.port}: {network.port_failure or 'free'}",
        "limits": f"{_limit(limits.open_files)} open files, {_limit(limits.processes)} processes, "
        f"{'any' if limits.locked_bytes is None else human_bytes(limits.locked_bytes)} "
        "locked memory",
        "processor": _processor(facts),
        "clock": {None: "not known", True: "synchronised", False: "not synchronised"}[
            facts.clock_is_set
        ],
    }


def _exchange(facts: HostFacts) -> str:
    trials = facts.exchange
    tried = {"Gloo": trials.gloo_failure, "shared memory": trials.memory_failure}
    if trials.nccl_tried:
        tried["NCCL"] = trials.nccl_failure
    works = [name for name, failure in tried.items() if not failure]
    shm = "" if trials.shm_bytes is None else f"; /dev/shm has {_gib(trials.shm_bytes)}"
    return _either(works, [name for name in tried if name not in works]) + shm


def _processor(facts: HostFacts) -> str:
    processor, limits = facts.processor, facts.limits
    quota = "" if limits.cpus is None else f" (time of {limits.cpus:g})"
    swapped = processor.swapped_bytes
    return (
        f"{processor.usable_cores} of {processor.cores} cores{quota}, {processor.threads} threads; "
        f"{_gib(processor.free_bytes)} of {_gib(processor.memory_bytes)} free"
        f"{f', {_gib(swapped)} swapped' if swapped else ''}"
    )


def _either(good: list[str], bad: list[str]) -> str:
    return ", ".join([*good, *(f"not {name}" for name in bad)]) or "–"


def _limit(limit: int | None) -> str:
    return "any number of" if limit is None else human_count(limit)


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.1f} GiB"
