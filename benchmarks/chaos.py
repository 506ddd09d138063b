"""Disturbs an elastic team at random, and checks what it has done.

    python benchmarks/chaos.py --seed 7 --minutes 5 --workers 3
    python benchmarks/chaos.py --seed 7 --minutes 1 --workers 3 --kinds stop,slow

The seed decides what happens, when, and to which of the workers that are there. Kinds of events:

- ``kill``: a worker is killed (SIGKILL), and the launcher replaces it.
- ``stop``: a worker is stopped (SIGSTOP), and continues after some seconds.
- ``slow``: each micro-batch of a worker takes longer, for some seconds.
- ``coordinator``: the coordinator is killed, and the launcher starts it again.

Events overlap, but one worker that has seen a window committed a moment ago is always left alone:
nothing else holds the state. The command prints the seed, each event, and a verdict. It fails if no
window is committed for ``--hang-s``, if a window is missing, if workers hold unlike bits after a
window or begin one with others, if no epoch was completed, or if a sample of one was not trained on
exactly once. A folder that ``--keep`` names has the logs of all workers.
"""

import argparse
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from contextlib import ExitStack, suppress
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from elastic_logs import WorkerLog, commit_times, verdict
from elastic_runs import ElasticTeam, send
from machine import load_before, write_report
from options import make_parser, some_of

KINDS = ("kill", "stop", "slow", "coordinator")
#: A worker that has seen a window committed so recently holds the state.
_RECENT_S = 3.0
_LOOK_S = 0.05
#: The launcher gives up where its coordinator ends more than 5 times in a minute.
_COORDINATOR_EVERY_S = 13.0


class Event(NamedTuple):
    """What is to happen.

    Attributes:
        at_s: Seconds after the begin.
        kind: One of ``KINDS``.
        whom: Chooses the worker, of those that are there; from 0 to 1.
        held_s: How long it lasts.
    """

    at_s: float
    kind: str
    whom: float
    held_s: float


def main() -> None:
    """Disturb one team, and check it."""
    arguments = parse_arguments()
    before = load_before()
    with ExitStack() as stack:
        folder = arguments.keep or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        folder.mkdir(parents=True, exist_ok=True)
        try:
            row = disturb(arguments, folder)
        except RuntimeError as error:
            sys.exit(f"verdict: unsound: {error}")
    words = row.pop("verdict")
    print(", ".join(f"{key} {value}" for key, value in row.items()))
    write_report(arguments, before, [row | {"verdict": words}])
    print(f"verdict: {'sound' if row['sound'] else 'unsound'}: {words}")
    sys.exit(0 if row["sound"] else 1)


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = make_parser(__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--minutes", type=float, default=2.0)
    parser.add_argument("--workers", type=int, default=3)
    parser.add_argument("--kinds", type=some_of(KINDS), default=list(KINDS), metavar="KIND,...")
    parser.add_argument("--every", type=float, default=3.0, metavar="SECONDS", help="on average")
    parser.add_argument("--hang-s", type=float, default=60.0)
    parser.add_argument("--policy", default="sync")
    parser.add_argument("--samples", type=int, default=2048)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--sleep", type=float, default=0.004, metavar="SECONDS", help="per sample")
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="leave the logs there")
    return parser.parse_args()


def draw_events(arguments: argparse.Namespace) -> list[Event]:
    """Return what is to happen, in order."""
    draw, events, at_s = random.Random(arguments.seed), [], 0.0
    while (at_s := at_s + draw.expovariate(1 / arguments.every)) < 60.0 * arguments.minutes:
        kind, whom, held_s = draw.choice(arguments.kinds), draw.random(), draw.uniform(0.2, 5.0)
        events.append(Event(at_s, kind, whom, held_s))
    return events


def disturb(arguments: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Let the events happen to a team; return what it has done."""
    options = ("--samples", arguments.samples, "--batch-size", arguments.batch_size)
    more = ("--sleep", arguments.sleep, "--policy", arguments.policy)
    began_t, events = time.time(), draw_events(arguments)
    print(
        f"seed {arguments.seed}: {len(events)} events for {arguments.workers} workers", flush=True
    )
    with ElasticTeam(folder, arguments.workers, (*options, *more)) as team:
        team.wait_for_all(windows=5)
        chaos = Chaos(team, arguments.hang_s)
        for event in events:
            chaos.wait_until(event.at_s)
            chaos.let_happen(event)
        chaos.wait_until(60.0 * arguments.minutes)
        chaos.end_all()
        team.wait_for_all(since_t=time.time())
        logs = team.logs()
    commits = sorted(commit_times(logs).values())
    return {
        "name": f"evener.{arguments.policy}",
        "seed": arguments.seed,
        "workers": arguments.workers,
        **{kind: chaos.happened[kind] for kind in arguments.kinds},
        "left_out": chaos.happened["left out"],
        "processes": len(logs),
        "windows": len(commits),
        "longest_gap_s": round(max(b - a for a, b in pairwise(commits)), 2),
        **verdict(logs, arguments.samples, arguments.policy),
        "seconds": round(time.time() - began_t),
    }


class Chaos:
    """Events, and what ends them.

    Args:
        team: To whom they happen.
        hang_s: Without a commit for so long, the team hangs.

    Attributes:
        happened: How many events of each kind there were.
    """

    def __init__(self, team: ElasticTeam, hang_s: float) -> None:
        self.happened: Counter[str] = Counter()
        self._team, self._hang_s = team, hang_s
        self._began_t = self._coordinator_t = time.time()
        self._stopped: dict[int, float] = {}  # processes, and when they continue
        self._continued: dict[int, float] = {}  # processes, and when they did
        self._slow: dict[Path, float] = {}  # files, and when they are removed

    def wait_until(self, at_s: float) -> None:
        """Wait, and end what is over.

        Raises:
            RuntimeError: The team hangs, or has ended.
        """
        while (now_t := time.time()) < self._began_t + at_s:
            self._end(now_t)
            newest_t = max(log.commits[-1]["t"] for log in self._team.logs() if log.commits)
            if self._team.process.poll() is not None or now_t - newest_t > self._hang_s:
                raise RuntimeError(
                    f"no window was committed for {now_t - newest_t:.1f} s:\n{self._team.said()}"
                )
            time.sleep(_LOOK_S)

    def let_happen(self, event: Event) -> None:
        """Let an event happen, unless too few would be left."""
        now_t = time.time()
        members = self._team.members()
        healthy = [log for log in members if self._holds_state(log, now_t)]
        victim = members[int(event.whom * len(members))] if members else None
        if event.kind == "coordinator":
            is_possible = now_t - self._coordinator_t >= _COORDINATOR_EVERY_S
        else:
            is_possible = victim is not None and any(log is not victim for log in healthy)
        kind = event.kind if is_possible else "left out"
        self.happened[kind] += 1
        who = victim.member if victim is not None and event.kind != "coordinator" else ""
        print(f"{now_t - self._began_t:7.2f} s: {event.kind} {who} ({kind})", flush=True)
        if kind == "coordinator":
            self._coordinator_t = send(self._team.coordinator(), signal.SIGKILL)
        elif kind != "left out" and victim is not None:
            self._disturb(victim, event, now_t)

    def _holds_state(self, log: WorkerLog, now_t: float) -> bool:
        """Return whether a worker has been in the team a moment ago, and was not left out of it."""
        since_t = max(now_t - _RECENT_S, self._continued.get(log.pid, 0.0))
        return log.pid not in self._stopped and log.commits_since(since_t) > 0

    def _disturb(self, victim: WorkerLog, event: Event, now_t: float) -> None:
        with suppress(ProcessLookupError):  # it has ended just now
            if event.kind == "kill":
                victim.kill()
            elif event.kind == "stop":
                send(victim.pid, signal.SIGSTOP)
                self._stopped[victim.pid] = now_t + event.held_s
            else:
                path = self._team.folder / f"slow-{victim.path.stem}"
                path.write_text(f"{event.whom}")
                self._slow[path] = now_t + event.held_s

    def _end(self, now_t: float) -> None:
        for pid in [pid for pid, end_t in self._stopped.items() if end_t <= now_t]:
            del self._stopped[pid]
            self._continued[pid] = time.time()
            with suppress(ProcessLookupError):
                send(pid, signal.SIGCONT)
        for path in [path for path, end_t in self._slow.items() if end_t <= now_t]:
            del self._slow[path]
            path.unlink()

    def end_all(self) -> None:
        """End all events that still last."""
        self._end(float("inf"))


if __name__ == "__main__":
    main()
