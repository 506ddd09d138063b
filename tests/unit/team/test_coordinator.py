"""The coordinator and the links of workers, over loopback: a thread of this process serves."""

import json
import random
import shutil
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager, suppress
from dataclasses import asdict, replace
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from evener.comm.c10d import PrefixStore
from evener.errors import (
    ConfigError,
    CoordinatorLostError,
    LaunchError,
    RunEndedError,
    TeamRefusedError,
)
from evener.protocol.formation import Deadlines, Formation, Standing
from evener.protocol.roster import Roster
from evener.team import coordinator as coordinator_module
from evener.team import elastic
from evener.team.connection import AgentConnection
from evener.team.elastic import CoordinatorLink
from evener.team.elastic_membership import ElasticMembership
from evener.version import __version__
from helpers import coordinators
from helpers.source import ROOT

TOKEN = b"a token of enough bytes"
WAIT_S = 30.0
#: A first generation forms only when the most workers are there, however slow this machine is.
DEADLINES = Deadlines(
    lease_s=0.3, beat_s=0.05, reconnect_s=0.3, stopped_s=0.2, gather_s=WAIT_S, hello_s=0.3
)
#: Of a coordinator that was started again: nobody is lost who is slow to come back.
AGAIN = replace(DEADLINES, reconnect_s=WAIT_S)


def serving(
    least: int = 1,
    most: int = 2,
    token: bytes | None = TOKEN,
    port: int = 0,
    deadlines: Deadlines = DEADLINES,
    **options: Any,
) -> AbstractContextManager[str]:
    """A coordinator on a thread; gives its address."""
    return coordinators.serving(least, most, deadlines, token=token, port=port, **options)


def link(
    address: str, member: str, token: bytes | None = TOKEN, **facts: object
) -> CoordinatorLink:
    return CoordinatorLink(address, token=token, member=member, facts=facts, timeout_s=WAIT_S)


@contextmanager
def team_of(address: str, *members: str) -> Iterator[list[CoordinatorLink]]:
    """Links whose first generation has formed."""
    with ExitStack() as stack:
        links = [stack.enter_context(link(address, member)) for member in members]
        form(links, [None] * len(links))
        yield links


def form(links: list[CoordinatorLink], standings: list[Standing | None]) -> list[Formation]:
    with ThreadPoolExecutor(len(links)) as pool:
        waiting = [
            pool.submit(one.next_generation, standing)
            for one, standing in zip(links, standings, strict=True)
        ]
        return [one.result(WAIT_S) for one in waiting]


def take_in(member: CoordinatorLink, joiner: CoordinatorLink, applied: int) -> Formation:
    """Let a single member change generations until the joiner is in."""
    with ThreadPoolExecutor(1) as pool:
        joins = pool.submit(joiner.next_generation, None)
        until(
            lambda: (
                joins.done()
                or (
                    (member.wants_change or member.why_over(member.generation))
                    and member.next_generation(standing(applied)).members[1:]
                )
            )
        )
        return joins.result(WAIT_S)


def standing(applied: int) -> Standing:
    return Standing(applied=applied, committed=applied, digest="00")


def connected(address: str) -> socket.socket:
    """A stranger's connection."""
    host, port = address.split(":")
    return socket.create_connection((host, int(port)), WAIT_S)


def until(condition: Callable[[], object]) -> None:
    end_s = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < end_s
        time.sleep(0.005)


def test_a_team_forms_loses_a_member_and_takes_in_another() -> None:
    with serving() as address, team_of(address, "a", "b") as (a, b):
        assert (a.number, b.number, a.generation, a.limits) == (0, 1, 1, (1, 2))
        assert a.await_lease(WAIT_S)
        b.close()
        until(lambda: a.why_over(1))
        assert "b is lost: its connection has ended" in a.why_over(1)
        with link(address, "c") as c:
            formation = take_in(a, c, applied=7)
            assert formation.members == ("a", "c")
            assert (formation.base, formation.source, formation.receivers) == (7, "a", ("c",))
            until(lambda: a.generation == formation.generation)


def test_an_agent_that_has_closed_its_connection_has_said_farewell() -> None:
    """The agent's process may end at once, and its threads with it."""
    with serving() as address:
        AgentConnection(address, token=TOKEN).close()
        assert "evener-coordinator-connection" not in {t.name for t in threading.enumerate()}


def test_other_agents_hear_of_a_host_whose_connection_has_ended_without_a_farewell(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with (
        serving(nnodes=2) as address,
        AgentConnection(address, token=TOKEN) as stays,
        AgentConnection(address, token=TOKEN) as goes,
        ThreadPoolExecutor(1) as pool,
    ):
        waiting = pool.submit(stays.enter, 0, 2, 1, 0, timeout_s=WAIT_S)
        goes.enter(1, 2, 1, 0, timeout_s=WAIT_S)
        waiting.result(WAIT_S)
        monkeypatch.setattr(goes, "_farewell", list)
        goes.close()
        heard: list[Any] = []
        until(lambda: heard.extend(stays.take_relayed()) or heard)
        assert str(heard[0]["lost"]).startswith("node 1 ")


def test_members_meet_in_the_store_of_their_generation() -> None:
    with serving() as address, team_of(address, "a", "b") as (a, b):
        mine, theirs = a.store(1), b.store(1)
        seen = PrefixStore("group", theirs)
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(theirs.get, "key")
            mine.set("key", b"\x00\xff")
            assert waiting.result(WAIT_S) == b"\x00\xff"
        mine.set("group/number", "4")
        assert seen.get("number") == b"4"
        assert (seen.add("number", 2), mine.add("other", 1)) == (6, 1)
        assert seen.check(["number"])
        assert not mine.check(["number"])
        assert seen.delete_key("number")
        assert not seen.delete_key("number")
        with pytest.raises(RuntimeError, match=r"waited up to 0.05 s .*no member has set it"):
            mine.wait(["nobody"], timedelta(seconds=0.05))
        with pytest.raises(RuntimeError, match="generation 7 is over"):
            a.store(7).set("key", "value")


def test_nobody_waits_for_the_key_of_a_member_that_is_lost() -> None:
    with (
        serving() as address,
        team_of(address, "a", "b") as (a, b),
        ThreadPoolExecutor(1) as pool,
    ):
        waiting = pool.submit(a.store(1, 10 * WAIT_S).get, "address of b")
        b.close()
        with pytest.raises(RuntimeError, match="its generation is over: b is lost"):
            waiting.result(WAIT_S)


def test_members_that_connect_to_one_another_do_so_though_the_coordinator_restarts() -> None:
    with ExitStack() as stack:
        with serving() as address:
            a, b = (stack.enter_context(link(address, member)) for member in "ab")
            form([a, b], [None, None])
            a.store(1).set("address of a", b"1")
            pool = stack.enter_context(ThreadPoolExecutor(2))
            early = pool.submit(a.store(1).get, "address of b")
        late = pool.submit(b.store(1).set, "address of b", b"2")
        with serving(port=int(address.rpartition(":")[2])):
            late.result(WAIT_S)
            assert early.result(WAIT_S) == b"2"
            assert b.store(1).get("address of a") == b"1"


def test_a_program_on_the_port_of_a_coordinator_that_is_away_ends_no_worker() -> None:
    with serving() as address, ExitStack() as stack:
        a = stack.enter_context(link(address, "a"))
        b = stack.enter_context(link(address, "b"))
        form([a, b], [None, None])
        stack = stack.pop_all()
    port = int(address.rpartition(":")[2])
    challenges = [
        {"nonce": "0", "evener": "0.0.0"},
        {"nonce": "0", "evener": __version__},
        {"type": "refused", "why": "go away"},
    ]
    with stack:
        with closing(socket.create_server(("127.0.0.1", port))) as stranger:
            for challenge in challenges:
                connection, _ = stranger.accept()
                with connection:
                    connection.sendall(json.dumps(challenge).encode() + b"\n")
                    connection.recv(65536)
        with serving(port=port, deadlines=AGAIN):
            until(lambda: a.await_lease(0.2) and b.await_lease(0.2))
            assert not a.why_over(1)
            assert form([a, b], [standing(3), standing(3)])[0].generation == 2


def test_who_comes_before_it_is_known_whether_the_team_has_begun_waits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A coordinator that was started again hears that from members, which may come later."""
    now_s = 100.0
    clock = SimpleNamespace(monotonic=lambda: now_s)
    monkeypatch.setattr("evener.lease_clock.time", clock)
    with (
        serving(most=3) as address,
        link(address, "early") as early,
        ThreadPoolExecutor(1) as pool,
    ):
        assert (early.generation, early._is_open) == (0, False)
        joining = pool.submit(
            ElasticMembership, early, address, 3, shares_memory=False, timeout_s=WAIT_S
        )
        now_s += 2 * DEADLINES.lease_s
        with closing(joining.result(WAIT_S)) as membership:
            assert early._is_open
            assert not membership.is_joining


def test_a_worker_that_starts_after_the_coordinator_has_ended_waits_for_patience_s(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(elastic, "Deadlines", lambda: replace(DEADLINES, patience_s=0.1))
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))  # and does not listen
        address = f"127.0.0.1:{nobody.getsockname()[1]}"
        with pytest.raises(LaunchError, match=r"worker a waited 0 s for the coordinator at"):
            link(address, "a")


def test_a_worker_that_loses_the_coordinator_waits_for_patience_s_and_says_so() -> None:
    deadlines = replace(DEADLINES, patience_s=0.3)
    with serving(most=1, deadlines=deadlines) as address:
        a = link(address, "a")
        a.next_generation(None)
    with a, pytest.raises(CoordinatorLostError, match=r"waited 0 s for it \(patience_s"):
        a.next_generation(standing(1))


@pytest.mark.parametrize(
    ("token", "theirs"),
    [(TOKEN, b"another token of enough bytes"), (TOKEN, None), (None, TOKEN)],
)
def test_a_wrong_token_is_refused(token: bytes | None, theirs: bytes | None) -> None:
    with serving(token=token) as address, pytest.raises(TeamRefusedError, match="token differs"):
        link(address, "a", theirs)


def test_the_token_does_not_travel() -> None:
    with closing(socket.create_server(("127.0.0.1", 0))) as listener:
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        listener.settimeout(WAIT_S)

        def pretend() -> bytes:
            connection, _ = listener.accept()
            with connection:
                challenge = {"nonce": "0", "evener": __version__}
                connection.sendall(json.dumps(challenge).encode() + b"\n")
                heard = connection.recv(65536)
                connection.sendall(b'{"type": "welcome", "generation": 9}\n')
            return heard

        with ThreadPoolExecutor(1) as pool:
            pretending = pool.submit(pretend)
            with pytest.raises(LaunchError):  # who pretends cannot prove that it knows the token
                CoordinatorLink(address, token=TOKEN, member="a", facts={}, timeout_s=2.0)
            heard = pretending.result(WAIT_S)
        assert heard
        assert TOKEN not in heard


def test_a_worker_has_the_number_that_it_wishes_if_that_is_free() -> None:
    with serving(most=3) as address, ExitStack() as stack:
        for member, wish, number in (("a", 2, 2), ("b", 2, 0), ("c", 1, 1), ("d", 0, -1)):
            one = stack.enter_context(
                CoordinatorLink(
                    address, token=TOKEN, member=member, facts={}, timeout_s=WAIT_S, wish=wish
                )
            )
            until(lambda one=one, number=number: one.number == number)


def test_differences_and_names_are_refused_with_what_to_do() -> None:
    with serving() as address, link(address, "a", model="one"):
        with pytest.raises(TeamRefusedError, match="another worker of this team is called 'a'"):
            link(address, "a")
        with link(address, "c", model="one") as late:
            late.describe({"data length": 3})
            with pytest.raises(TeamRefusedError, match="model of c is 'three'"):
                late.describe({"model": "three"})
            with pytest.raises(TeamRefusedError, match="model of c is 'three'"):
                late.next_generation(None)


def test_the_main_process_hears_who_was_refused() -> None:
    with serving() as address, team_of(address, "a", "b") as (a, b):
        with pytest.raises(TeamRefusedError, match="is called 'b'"):
            link(address, "b")
        refused: list[tuple[str, str]] = []
        until(lambda: refused.extend(a.take_refused()) or refused)
        ((name, why),) = refused
        assert name == "b"
        assert "another worker of this team is called 'b'" in why
        assert (a.take_refused(), b.take_refused()) == ([], [])


def test_a_thousand_damaged_messages_do_no_harm() -> None:
    noise = random.Random(1)
    texts = [
        {"type": "report", "generation": 1, "standing": None},
        {"type": "beat", "micro_batches": 1, "phase": "training", "at": 0.0},
        {"type": "store", "number": 1, "generation": 1, "what": "put", "keys": ["k"], "value": ""},
        {"type": "facts", "facts": {}},
        {"session": "s", "facts": {}, "held": None, "wish": 0, "address": "127.0.0.1"},
    ]
    with serving(token=None, most=1) as address, ExitStack() as stack:
        a = stack.enter_context(link(address, "a", None))
        a.next_generation(None)
        proof = json.dumps({"role": "worker", "member": "fuzz", "nonce": "0"}).encode() + b"\n"
        hello = proof + json.dumps(texts[-1]).encode() + b"\n"
        for _ in range(1000):  # each on a connection of its own, which it may end
            with closing(connected(address)) as connection, suppress(OSError):
                line = bytearray(json.dumps(_damaged(noise, noise.choice(texts))).encode())
                if noise.random() < 0.2:
                    line[noise.randrange(len(line))] = noise.randrange(256)
                connection.sendall(hello + line + b"\n")
        assert a.await_lease(WAIT_S)
        # What has come may have been a worker that waits to join, never one that ends the team.
        assert not a.why_over(1)


def _damaged(noise: random.Random, message: dict[str, object]) -> dict[str, object]:
    values: list[object] = [None, -1, 2**70, 1e400, "", [], {}, [[]], True, "x" * 1000, -0.5]
    damaged = dict(message)
    for key in noise.sample(sorted(damaged), 1):
        damaged[key] = noise.choice(values)
    if noise.random() < 0.2:
        del damaged[noise.choice(sorted(damaged))]
    return damaged


def test_without_a_token_it_listens_on_loopback_alone() -> None:
    with pytest.raises(ConfigError, match=r"the coordinator on 0\.0\.0\.0 would .* --token-file"):
        coordinators.opened(host="0.0.0.0", most=2)


def test_the_documentation_has_every_deadline_with_its_default() -> None:
    text = (ROOT / "docs" / "elastic.md").read_text()
    for name, value in asdict(Deadlines()).items():
        assert f"| `{name}` | {value:g} |" in text


# ── the ledger ───────────────────────────────────────────────────────────────────────────────────


def test_a_coordinator_with_a_ledger_continues_though_no_member_has_come_back(
    tmp_path: Path,
) -> None:
    ledger = tmp_path / "ledger.json"
    with serving(ledger=ledger) as address, ExitStack() as stack:
        a = stack.enter_context(link(address, "a", model="one"))
        b = stack.enter_context(link(address, "b", model="one"))
        form([a, b], [None, None])
        a.describe({"run folder": "/runs/one"})
        until(lambda: "/runs/one" in ledger.read_text())
    written = json.loads(ledger.read_text())
    assert written["formation"]["members"] == ["a", "b"]
    assert written["formation"]["numbers"] == [0, 1]
    assert written["facts"] == {"model": "one", "run folder": "/runs/one"}
    alone = replace(DEADLINES, gather_s=0.1)
    with serving(ledger=ledger, deadlines=alone) as address:
        with pytest.raises(TeamRefusedError, match="model of c is 'two', and that of a "):
            link(address, "c", model="two")
        with link(address, "d", model="one") as d:
            until(lambda: d.generation == 1)  # none beside the members of another one
            assert d.describe({})["run folder"] == "/runs/one"
            formation = d.next_generation(None)
            assert (formation.generation, formation.members) == (2, ("d",))
            assert not formation.has_state
    assert json.loads(ledger.read_text())["formation"]["generation"] == 2


def test_a_run_that_has_ended_has_ended_for_a_coordinator_that_is_started_again(
    tmp_path: Path,
) -> None:
    ledger = tmp_path / "ledger.json"
    with serving(most=1, ledger=ledger) as address, link(address, "a") as a:
        a.next_generation(None)
        a.leave(finished=True)
    with (
        serving(most=1, ledger=ledger) as address,
        link(address, "late") as late,
        pytest.raises(RunEndedError, match=r"start another coordinator \(with its own ledger"),
    ):
        late.next_generation(None)


@pytest.mark.parametrize(
    ("content", "why"),
    [
        ("{}", "format is missing"),
        ('{"format": "evener ledger 1", "limits": [1, 2]', "delimiter"),
        ('{"format": "evener manifest 1"}', "not 'evener ledger 1'"),
        ('{"format": "evener ledger 1", "limits": [3, 4]}', "a team of 3:4 workers, this .* 1:2"),
        (
            '{"format": "evener ledger 1", "limits": [1, 2], "formation": 3}',
            "formation is 3",
        ),
    ],
)
def test_a_ledger_that_is_damaged_or_of_another_team_is_refused(
    tmp_path: Path, content: str, why: str
) -> None:
    ledger = tmp_path / "ledger.json"
    ledger.write_text(content)
    with pytest.raises(ConfigError, match=f"ledger.json cannot be used: .*{why}") as caught:
        coordinators.opened(least=1, most=2, ledger=ledger)
    assert "remove the file to begin a new team" in str(caught.value)
    assert ledger.read_text() == content


def test_one_coordinator_has_a_ledger_at_a_time(tmp_path: Path) -> None:
    ledger = tmp_path / "ledger.json"
    with (
        serving(ledger=ledger),
        pytest.raises(ConfigError, match="another coordinator has the ledger"),
    ):
        coordinators.opened(most=2, ledger=ledger)
    with pytest.raises(ConfigError, match="give a file in a folder that exists"):
        coordinators.opened(most=2, ledger=tmp_path / "none" / "ledger.json")


def test_a_ledger_that_cannot_be_written_ends_no_team(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    with serving(most=1, ledger=folder / "ledger.json") as address, link(address, "a") as a:
        shutil.rmtree(folder)
        a.next_generation(None)
        assert a.await_lease(WAIT_S)
    assert "ledger.json cannot be written" in capsys.readouterr().err


# ── names and clocks ─────────────────────────────────────────────────────────────────────────────


def test_a_name_that_is_not_known_yet_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    resolve, num_asked = socket.getaddrinfo, 0

    def unknown_at_first(host: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal num_asked
        if host == "coordinator.example":
            num_asked += 1
            if num_asked < 3:
                raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
            host = "127.0.0.1"
        return resolve(host, *args, **kwargs)

    monkeypatch.setattr(socket, "getaddrinfo", unknown_at_first)
    with serving() as address:
        port = address.rpartition(":")[2]
        with link(f"coordinator.example:{port}", "a") as a:
            assert num_asked >= 3
            until(lambda: a.number == 0)
        num_asked = -10_000
        with pytest.raises(LaunchError, match=r"the name 'coordinator\.example' is unknown here"):
            CoordinatorLink(
                f"coordinator.example:{port}", token=TOKEN, member="b", facts={}, timeout_s=0.3
            )


def test_a_lease_counts_the_time_in_which_the_machine_was_suspended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A laptop sleeps: ``time.monotonic`` stands still, and nothing is sent."""
    asleep_s = 0.0
    clocks = SimpleNamespace(
        CLOCK_BOOTTIME=7,
        clock_gettime=lambda _: time.monotonic() + asleep_s,
        monotonic=time.monotonic,
    )
    monkeypatch.setattr("evener.lease_clock.time", clocks)
    with ExitStack() as stack:
        with serving(most=1, deadlines=replace(DEADLINES, lease_s=60.0, host_lease_s=60.0)) as at:
            monkeypatch.setattr(Roster, "is_open", lambda *_: True)
            a = stack.enter_context(link(at, "a"))
            a.next_generation(None)
            assert a.await_lease(WAIT_S)
        assert a.await_lease(0.0)
        asleep_s = 61.0
        assert not a.await_lease(0.0)


# ── strangers ────────────────────────────────────────────────────────────────────────────────────


def test_a_hello_of_more_than_4_kib_ends_its_connection(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with serving() as address, closing(connected(address)) as stranger:
        stranger.sendall(b"x" * 5000)
        with suppress(OSError):
            while stranger.recv(65536):
                pass
    assert "an unknown process: a message has more than 4096 bytes" in capsys.readouterr().err


def test_a_flood_of_strangers_delays_no_heartbeat(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(coordinator_module, "_MOST_PER_TICK", 500)  # or it takes long
    monkeypatch.setattr(Roster, "is_open", lambda *_: True)
    deadlines = replace(DEADLINES, lease_s=5.0, host_lease_s=WAIT_S, hello_s=0.5)

    def come(seed: int) -> None:
        noise = random.Random(seed)
        for number in range(100):
            with suppress(OSError), closing(connected(address)) as stranger:
                stranger.sendall(noise.randbytes(noise.choice([0, 10, 5000])) + b"\n")
                if number % 20 == 0:  # it reads why it was refused, or waits until it is closed
                    while stranger.recv(65536):
                        pass

    with (
        serving(deadlines=deadlines) as address,
        team_of(address, "a", "b") as (a, b),
        ThreadPoolExecutor(8) as pool,
    ):
        assert a.await_lease(WAIT_S)
        coming = [pool.submit(come, seed) for seed in range(8)]
        while not all(one.done() for one in coming):
            assert a.await_lease(0.0), "beats are answered between strangers"
            time.sleep(0.01)
        assert not a.why_over(1)
        assert form([a, b], [standing(1), standing(1)])[0].generation == 2


def test_a_stranger_evicts_no_other_and_no_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(coordinator_module, "_MOST_UNIDENTIFIED", 3)
    deadlines = replace(DEADLINES, hello_s=2.0)
    with (
        serving(most=3, deadlines=deadlines) as address,
        team_of(address, "a", "b", "c") as (a, *_),
        ExitStack() as stack,
    ):
        first = [stack.enter_context(connected(address)) for _ in range(3)]
        assert all(b"challenge" in each.recv(4096) for each in first)
        late = stack.enter_context(connected(address))
        with suppress(ConnectionResetError):
            assert late.recv(4096) == b"", "refused, as the others came first"
        first[0].setblocking(False)
        with pytest.raises(BlockingIOError):
            first[0].recv(1)
        assert a.await_lease(WAIT_S)
        # A worker that comes now waits, and has its turn when the silent ones are closed.
        with pytest.raises(TeamRefusedError, match="called 'a'"):
            link(address, "a")
