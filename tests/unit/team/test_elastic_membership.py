"""Memberships of an elastic team, on threads of this process; a coordinator serves them."""

import socket
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace
from typing import Any

import pytest

from evener.comm.addresses import LOOPBACK
from evener.comm.base import Communicator
from evener.comm.network import MeetingPoint
from evener.errors import CoordinatorLostError, LaunchError, PeerLostError, TeamRefusedError
from evener.protocol.formation import Deadlines, Standing
from evener.team import elastic_membership
from evener.team.backends import ExchangeFacts
from evener.team.elastic import CoordinatorLink, GenerationStore
from evener.team.elastic_membership import ElasticMembership
from helpers.coordinators import serving
from helpers.gpu_facts import ON_CPU, ON_GPU, OTHER_GPU
from helpers.limits import PATIENCE_S

DEADLINES = Deadlines(lease_s=0.3, beat_s=0.05, gather_s=PATIENCE_S, connect_s=PATIENCE_S)


class Pair:
    """Two memberships whose generations form together."""

    def __init__(self, members: list[ElasticMembership], pool: ThreadPoolExecutor) -> None:
        self.members, self.pool = members, pool
        self.applied = -1

    def form(self) -> list[Communicator]:
        """Changes the generation; raises what the first one raises."""
        self.applied += 1
        return [
            one.result(PATIENCE_S).comm
            for one in [self.pool.submit(m.next_generation, self._standing()) for m in self.members]
        ]

    def _standing(self) -> Standing | None:
        if not self.applied:
            return None
        return Standing(applied=self.applied, committed=self.applied, digest="00")


@contextmanager
def pair(
    *gpus: ExchangeFacts,
    deadlines: Deadlines = DEADLINES,
    shares_memory: bool = False,
    host: str = LOOPBACK,
) -> Iterator[Pair]:
    """Members a and b; with ``gpus``, they were asked to exchange over NCCL."""

    def join(member: str, gpu: ExchangeFacts | None) -> ElasticMembership:
        link = CoordinatorLink(address, token=None, member=member, facts={}, timeout_s=PATIENCE_S)
        options: Any = {"shares_memory": shares_memory, "timeout_s": PATIENCE_S, "gpu": gpu}
        return ElasticMembership(link, address, 2, **options)

    with (
        serving(1, 2, deadlines, host=host) as address,
        ThreadPoolExecutor(2) as pool,
        ExitStack() as stack,
    ):
        # One after the other, so that a is rank 0. Handlers of signals are for the main thread.
        pairs = zip("ab", gpus or (None, None), strict=True)
        members = [pool.submit(join, *one).result(PATIENCE_S) for one in pairs]
        for membership in members:
            stack.callback(membership.close)
        yield Pair(members, pool)


class Clock:
    """Stands for ``time``: a clock on which time passes at will, too."""

    passed_s = 0.0

    def monotonic(self) -> float:
        return time.monotonic() + self.passed_s

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)


class PretendedNccl:
    """Stands for NCCL: groups that are formed and ended, by rank; none carries anything."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, fails_on: int | None = None) -> None:
        self.formed: list[int] = []
        self.ended: list[int] = []
        self.fails_on = fails_on
        monkeypatch.setattr("evener.comm.groups.form_nccl", self.form)
        monkeypatch.setattr("evener.comm.groups.end_nccl", self.end)

    def form(self, store: Any, rank: int, world_size: int, *limits_s: float) -> int:
        if rank == self.fails_on:
            raise RuntimeError("unhandled cuda error")
        self.formed.append(rank)
        return rank

    def end(self, group: int, store: Any) -> None:
        self.ended.append(group)


@pytest.mark.parametrize("shares_memory", [False, True])
def test_every_generation_has_an_nccl_group_of_its_own(
    monkeypatch: pytest.MonkeyPatch, shares_memory: bool
) -> None:
    nccl = PretendedNccl(monkeypatch)
    with pair(ON_GPU, OTHER_GPU, shares_memory=shares_memory) as team:
        for number in range(1, 4):
            comms = team.form()
            assert [comm.backend for comm in comms] == ["nccl", "nccl"]
            assert len(nccl.formed) == 2 * number
            for comm in comms:
                comm.close()
            assert sorted(nccl.ended) == sorted(nccl.formed)


def test_members_do_without_nccl_where_one_cannot_connect(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    nccl = PretendedNccl(monkeypatch, fails_on=1)
    with pair(ON_GPU, OTHER_GPU) as team:
        comms = team.form()
        assert [comm.backend for comm in comms] == ["gloo", "gloo"]
        assert nccl.ended == nccl.formed == [0]
        assert comms[0].reason == comms[1].reason
        for comm in comms:
            comm.close()
        nccl.fails_on = None
        assert [comm.backend for comm in team.form()] == ["nccl", "nccl"]  # it is tried again
    said = capsys.readouterr().err
    assert said.count("NCCL failed on rank 1: unhandled cuda error; so ranks exch") == 1


def test_members_do_without_nccl_where_one_has_no_gpu(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    nccl = PretendedNccl(monkeypatch)
    with pair(ON_GPU, ON_CPU) as team:
        assert [comm.backend for comm in team.form()] == ["gloo", "gloo"]
    assert not nccl.formed
    assert "rank 1 computes on the CPU, and NCCL connects only GPUs; so" in capsys.readouterr().err


def test_members_that_cannot_connect_say_so_and_give_up_after_timeout_s(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Neither the time between attempts counts, nor that of a process that is stopped in one."""
    clock = Clock()

    def refuse(*_: object, **options: object) -> None:
        clock.passed_s += 1e6
        raise RuntimeError("Connect timeout [127.0.0.1]:9")

    monkeypatch.setattr(elastic_membership, "form_groups", refuse)
    deadlines = replace(DEADLINES, timeout_s=2.5 * PATIENCE_S)  # connect_s is PATIENCE_S
    with pair(deadlines=deadlines) as team:
        monkeypatch.setattr(elastic_membership, "time", clock)
        for _ in range(2):
            with pytest.raises(PeerLostError):
                team.form()
            clock.passed_s += 1e6
        with pytest.raises(
            LaunchError, match=r"could not connect to a generation for 300 s \(timeout_s\).*Connect"
        ):
            team.form()
    said = capsys.readouterr().err
    assert "a could not connect to all members of generation 2, which are a, b, within" in said


def test_a_worker_that_waits_for_an_announcement_notices_that_the_coordinator_is_lost() -> None:
    with ExitStack() as stack:
        with serving(1, 1, replace(DEADLINES, patience_s=0.2)) as address:
            link = CoordinatorLink(address, token=None, member="a", facts={}, timeout_s=PATIENCE_S)
            stack.callback(link.close)
            limits: Any = {"shares_memory": False, "timeout_s": PATIENCE_S}
            membership = stack.enter_context(ElasticMembership(link, address, 1, **limits))
            membership.next_generation(None)
        with pytest.raises(CoordinatorLostError, match="patience_s"):
            membership.described("run folder", PATIENCE_S)


def test_a_member_tells_whom_it_could_not_reach_and_the_newest_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Both reach the coordinator; b announces a port at which nobody answers, as by a firewall."""

    def refuse(meeting: MeetingPoint, *, rank: int, numbers: Sequence[int], **_: object) -> None:
        meeting.meet(numbers[rank], numbers)
        raise RuntimeError("Connect timeout")

    with (
        closing(socket.socket()) as silent,
        pair(deadlines=replace(DEADLINES, gather_s=0.2)) as team,
        monkeypatch.context() as patch,
    ):
        silent.bind(("127.0.0.1", 0))  # and does not listen
        patch.setattr(elastic_membership, "form_groups", refuse)
        announce, place = GenerationStore.set, f"127.0.0.1 {silent.getsockname()[1]}"

        def misdirect(store: GenerationStore, key: str, value: str | bytes) -> None:
            announce(store, key, place if key == "place of 1" else value)

        patch.setattr(GenerationStore, "set", misdirect)
        a, b = team.members
        attempts = [team.pool.submit(each.next_generation, None) for each in (a, b)]
        with pytest.raises(PeerLostError, match="it does not reach b"):
            attempts[0].result(PATIENCE_S)
        with pytest.raises(PeerLostError):
            attempts[1].result(PATIENCE_S)
        again = [team.pool.submit(each.next_generation, None) for each in (a, b)]
        with pytest.raises(TeamRefusedError, match=r"b \(at 127.* reaches .* a does"):
            again[1].result(PATIENCE_S)
        assert again[0].result(PATIENCE_S).formation.members == ("a",)
    assert "a does not reach it; let the workers' machines connect" in capsys.readouterr().err


def test_members_form_a_group_on_ipv6() -> None:
    with pair(host="::1") as team:
        for comm in team.form():
            comm.close()


def test_whoever_was_stopped_and_replaced_may_write_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A clock that jumps stands for the stop: the lease has run out before anything is heard."""
    with pair(deadlines=replace(DEADLINES, gather_s=0.2)) as team:
        for comm in team.form():
            comm.close()
        a, b = team.members
        assert a.may_write()
        ended = {1: "the team continued without a"}
        monkeypatch.setattr(a._link, "_lease_end_s", 1.0)
        monkeypatch.setattr(a._link, "_over", ended)
        assert not a.may_write()
        assert b.may_write()
