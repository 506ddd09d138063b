from evener.team.host import MemoryWatch


def write(root, **files):
    """A file system with these; ``_`` stands for what a name cannot hold."""
    names = {
        "groups": "proc/self/cgroup",
        "meminfo": "proc/meminfo",
        "vmstat": "proc/vmstat",
        "own_v2": "sys/fs/cgroup/job/memory.events",
        "top_v1": "sys/fs/cgroup/memory/memory.oom_control",
    }
    for name, text in files.items():
        path = root / names[name]
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


PLENTY = "MemTotal:  1000 kB\nMemAvailable:  400 kB\n"
LITTLE = "MemTotal:  1000 kB\nMemAvailable:  9 kB\n"


def test_memory_was_short_if_the_counter_of_the_own_group_went_up(tmp_path):
    write(tmp_path, groups="0::/job\n", meminfo=PLENTY, vmstat="oom_kill 3\n")
    write(tmp_path, own_v2="oom 0\noom_kill 1\n")
    watch = MemoryWatch(tmp_path)
    write(tmp_path, vmstat="oom_kill 4\n")
    assert not watch.was_short(), "the kernel has killed in another group"
    write(tmp_path, own_v2="oom 2\noom_kill 2\n")
    assert watch.was_short()


def test_the_counter_of_a_container_or_of_the_machine_counts_too(tmp_path):
    write(tmp_path, groups="4:memory:/of/the/host\n0::/\n", top_v1="oom_kill 0\n")
    watch = MemoryWatch(tmp_path)
    write(tmp_path, top_v1="oom_kill 1\n")
    assert watch.was_short()
    machine = tmp_path / "machine"
    write(machine, vmstat="oom_kill 3\n")
    watch = MemoryWatch(machine)
    write(machine, vmstat="oom_kill 4\n")
    assert watch.was_short()


def test_memory_was_short_if_little_was_left_at_the_look_before(tmp_path):
    write(tmp_path, meminfo=LITTLE)
    watch = MemoryWatch(tmp_path)
    watch.look()
    write(tmp_path, meminfo=PLENTY)  # the process that was killed has given its memory back
    assert watch.was_short()
    assert not watch.was_short()


def test_without_proc_nothing_is_known_of_memory(tmp_path):
    assert not MemoryWatch(tmp_path).was_short()
