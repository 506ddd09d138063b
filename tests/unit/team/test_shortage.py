import pytest

from evener.team import host


@pytest.fixture
def write(tmp_path, monkeypatch):
    monkeypatch.setattr(host, "_PROC", tmp_path / "proc")
    monkeypatch.setattr(host, "_GROUPS", tmp_path / "groups")

    def write(name, text):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    return write


def test_kills_are_those_of_the_own_group_or_else_of_the_machine(write):
    assert host.count_kills() == 0, "without /proc nothing is known"
    write("proc/vmstat", "nr_free_pages 7\noom_kill 3\n")
    assert host.count_kills() == 3
    write("groups/memory/memory.oom_control", "under_oom 0\noom_kill 4\n")
    assert host.count_kills() == 4, "of a container, with the first form of control groups"
    write("groups/memory.events", "oom 0\noom_kill 5\n")
    assert host.count_kills() == 5, "of a container"
    write("proc/self/cgroup", "0::/job\n")
    write("groups/job/memory.events", "oom 0\noom_kill 6\n")
    assert host.count_kills() == 6
