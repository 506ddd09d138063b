"""How long a team is held up when a worker is killed, and whether anything is lost.

    python benchmarks/kill.py --json kill.json
    python benchmarks/kill.py --quick
    python benchmarks/kill.py --what stop --workers 3 --kills 10
    python benchmarks/kill.py --what coordinator --kills 4

A worker is killed by SIGKILL at a random moment. Measured is the time from the kill to the first
commit of a window that no worker had applied at that moment, less the usual length of a window: a
window that was over before the kill does not count. The launcher replaces the worker; the next kill
comes once all take part again. The workers of ``--workers`` compute, those of ``--sleepers`` sleep.

``--what stop`` stops a worker (SIGSTOP) and continues it ``--stopped-s`` after the team has
committed without it. ``--what coordinator`` kills the coordinator; ``delay_s`` is then the longest
time between two commits of the next seconds, less a window, and ``restart_s`` the time until its
successor accepts connections. ``--what strangers`` connects to the coordinator 200 times, without
its token and with nonsense; ``delay_s`` is counted in the same way. Of many windows one is always
longer than the usual one: ``undisturbed_s`` says by how much, in as many seconds before.

The command fails if a run ends, if a window is missing, if workers hold unlike bits after a window
or begin one with others (so a restarted worker contributes only with the team's bits), if no epoch
was completed, or if a sample of one was not trained on exactly once.
"""

import argparse
import json
import random
import signal
import socket
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from itertools import pairwise, zip_longest
from pathlib import Path
from typing import Any

import numpy as np
from elastic_logs import (
    WorkerLog,
    commit_times,
    first_commit,
    last_applied,
    redone,
    verdict,
    window_s,
)
from elastic_runs import ElasticTeam, send
from machine import load_average, load_before, write_report
from options import make_parser, numbers, some_of

#: Delays above this are listed one by one.
LISTED_S = 3.0
WHAT = ("kill", "stop", "coordinator", "strangers")
#: What is known of a disturbance: when it was (``t``), when it was over, and the rank.
Moment = dict[str, Any]
#: After the coordinator's end its leases (3 s) run out, if they do.
_WATCHED_S = 8.0
#: What is watched for so long, and before it.
_WATCHED = ("coordinator", "strangers")
#: The launcher gives up where its coordinator ends more than 5 times in a minute.
_COORDINATOR_EVERY_S = 13.0
_STRANGERS = 200


def main() -> None:
    """Disturb each team as often as was asked for."""
    arguments = parse_arguments()
    before = load_before()
    draw = random.Random(arguments.seed)
    teams = [(workers, False) for workers in arguments.workers]
    teams += [(workers, True) for workers in arguments.sleepers]
    rows = [
        measure(arguments, what, workers, draw, sleep=sleep)
        for what in arguments.what
        for workers, sleep in teams
    ]
    for row in rows:
        print(", ".join(f"{key} {value}" for key, value in row.items()))
    write_report(arguments, before, rows)
    sys.exit(0 if all(row["sound"] for row in rows) else 1)


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = make_parser(__doc__)
    parser.add_argument("--what", type=some_of(WHAT), default=["kill"], metavar="WHAT,...")
    parser.add_argument("--workers", type=numbers, help="of teams that compute; 2,3 by default")
    parser.add_argument("--sleepers", type=numbers, help="of teams that sleep; 5 by default")
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--policy", default="sync")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--samples", type=int, default=8192)
    parser.add_argument("--batch-size", type=int, default=256)
    parser.add_argument("--width", type=int, default=384)
    parser.add_argument("--sleep", type=float, default=0.0005, help="seconds per sample, asleep")
    parser.add_argument("--stopped-s", type=float, default=1.0)
    parser.add_argument("--quick", action="store_true", help="3 kills of one of 2 that sleep")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.kills = min(arguments.kills, 3)
    if arguments.workers is None and arguments.sleepers is None:
        arguments.workers, arguments.sleepers = ([], [2]) if arguments.quick else ([2, 3], [5])
    arguments.workers, arguments.sleepers = arguments.workers or [], arguments.sleepers or []
    return arguments


def measure(
    arguments: argparse.Namespace, what: str, workers: int, draw: random.Random, *, sleep: bool
) -> dict[str, Any]:
    """Disturb one team again and again, and check what it has done."""
    options = ["--samples", arguments.samples, "--batch-size", arguments.batch_size]
    options += ["--policy", arguments.policy]
    options += ["--sleep", arguments.sleep] if sleep else ["--width", arguments.width]
    began_t, moments = time.time(), []
    disturb = DISTURBANCES[what]
    with (
        tempfile.TemporaryDirectory() as folder,
        ElasticTeam(Path(folder), workers, options) as team,
    ):
        team.wait_for_all(windows=5)
        usual_s = window_s(team.logs())
        for _ in range(arguments.kills):
            time.sleep(draw.uniform(0.0, 3 * usual_s) + _WATCHED_S * (what in _WATCHED))
            load = load_average()
            moments.append({"load": load, **disturb(team, draw, arguments)})
            team.wait_for_all(windows=5, since_t=moments[-1]["over_t"])
        logs = team.logs()
    return {
        "name": f"evener.{arguments.policy}",
        "what": what,
        "workers": workers,
        "asleep": sleep,
        "times": len(moments),
        **describe(logs, moments, what, arguments.policy),
        **verdict(logs, arguments.samples, arguments.policy),
        "seconds": round(time.time() - began_t),
    }


def kill(team: ElasticTeam, draw: random.Random, arguments: argparse.Namespace) -> Moment:
    """Kill a worker."""
    del arguments
    victim = draw.choice(team.members())
    killed_t = victim.kill()
    return {"t": killed_t, "over_t": killed_t, "rank": victim.handed[-1]["rank"]}


def stop(team: ElasticTeam, draw: random.Random, arguments: argparse.Namespace) -> Moment:
    """Stop a worker, and continue it when the team has done without."""
    victim = draw.choice(team.members())
    stopped_t = send(victim.pid, signal.SIGSTOP)
    team.wait_for_commits(stopped_t, windows=3)
    time.sleep(arguments.stopped_s)
    continued_t = send(victim.pid, signal.SIGCONT)
    return {"t": stopped_t, "over_t": continued_t, "rank": victim.handed[-1]["rank"]}


def kill_coordinator(
    team: ElasticTeam, draw: random.Random, arguments: argparse.Namespace
) -> Moment:
    """Kill the coordinator, and wait until its leases would have run out."""
    del draw, arguments
    workers = {log.pid for log in team.alive()}
    ended = team.coordinator()
    killed_t = send(ended, signal.SIGKILL)
    restart_s = team.wait_for_coordinator(ended) - killed_t
    time.sleep(max(0.0, killed_t + _COORDINATOR_EVERY_S - time.time()))
    died = len(workers - {log.pid for log in team.alive()})
    return {"t": killed_t, "over_t": killed_t, "restart_s": restart_s, "died": died}


def besiege(team: ElasticTeam, draw: random.Random, arguments: argparse.Namespace) -> Moment:
    """Connect to the coordinator many times, and send what no worker would."""
    del arguments
    begun_t = time.time()
    hello = {"role": "worker", "member": "x", "session": "s", "facts": {}, "held": None, "wish": 0}
    with ExitStack() as stack:
        for number in range(_STRANGERS):
            stranger = socket.create_connection(("127.0.0.1", team.port()), 10.0)
            stack.enter_context(stranger)
            with suppress(OSError):  # it has been closed already
                if number % 4 == 1:
                    stranger.sendall(draw.randbytes(4096))
                elif number % 4 == 2:
                    stranger.sendall(json.dumps({**hello, "nonce": "0"}).encode() + b"\n")
                elif number % 4 == 3:
                    stranger.sendall(b"x" * 300_000)
        time.sleep(2.0)
    return {"t": begun_t, "over_t": time.time()}


DISTURBANCES = {"kill": kill, "stop": stop, "coordinator": kill_coordinator, "strangers": besiege}


def describe(
    logs: Sequence[WorkerLog], moments: Sequence[Moment], what: str, policy: str
) -> dict[str, Any]:
    """What the moments cost, in seconds, and how much work was done twice."""
    delays, calm, twice, listed, usual = [], [], [], [], []
    for moment, following in zip_longest(moments, moments[1:]):
        t, end_t = moment["t"], following["t"] if following else float("inf")
        usual.append(window_s(logs, t))
        if what in _WATCHED:
            delay_s = longest_gap_s(logs, t, t + _WATCHED_S) - usual[-1]
            calm.append(longest_gap_s(logs, t - _WATCHED_S, t) - usual[-1])
        else:
            delay_s = first_commit(logs, t) - t - usual[-1]
        delays.append(max(0.0, delay_s))
        twice.append(redone(logs, t, end_t))
        if delay_s > LISTED_S:
            into = (t - last_applied(logs, t)) / usual[-1]
            listed.append({"delay_s": delay_s, "windows_since_last_applied": into, **moment})
    told: dict[str, Any] = {
        "window_s": round(statistics.median(usual), 4),
        "delay_s": round(statistics.median(delays), 3),
        "delay_s_p90": round(float(np.quantile(delays, 0.9)), 3),
        "delay_s_max": round(max(delays), 3),
        # In ASYNC a window begins before the one before is over, so its work is not told apart.
        "redone_windows_max": None if policy == "async" else round(max(twice), 3),
        "above_3_s": [{k: round(v, 3) for k, v in one.items()} for one in listed],
    }
    if calm:
        told["undisturbed_s"] = round(statistics.median(calm), 3)
        told["undisturbed_s_max"] = round(max(calm), 3)
    if what == "coordinator":
        told["restart_s"] = round(statistics.median(m["restart_s"] for m in moments), 3)
        # What leases add: the part of a delay that the restart does not explain.
        beyond = [delay - m["restart_s"] for delay, m in zip(delays, moments, strict=True)]
        told["beyond_restart_s_max"] = round(max(beyond), 3)
        told["workers_died"] = sum(m["died"] for m in moments)
    elif what != "strangers":
        backs = [back_t(logs, m["over_t"]) - m["over_t"] for m in moments]
        told["back_s"] = round(statistics.median(backs), 3)
    return told


def longest_gap_s(logs: Sequence[WorkerLog], from_t: float, to_t: float) -> float:
    """Return the longest time between two commits of a span."""
    times = sorted(t for t in commit_times(logs).values() if from_t - 5.0 < t < to_t)
    return max(b - a for a, b in pairwise(times) if b > from_t)


def back_t(logs: Sequence[WorkerLog], over_t: float) -> float:
    """Return when the worker that had been away for longest saw a window committed again."""
    first = []
    for log in logs:
        times = [line["t"] for line in log.commits]
        if times and times[-1] > over_t:
            before = max((t for t in times if t <= over_t), default=0.0)
            first.append((before, min(t for t in times if t > over_t)))
    return min(first)[1]


if __name__ == "__main__":
    main()
