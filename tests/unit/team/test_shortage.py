from evener.team.host import MemoryWatch


def write(root, **files):
    """A ``/proc`` with these files."""
    for name, text in files.items():
        path = root / "proc" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


PLENTY = "MemTotal:  1000 kB\nMemAvailable:  400 kB\n"
LITTLE = "MemTotal:  1000 kB\nMemAvailable:  9 kB\n"


def test_memory_was_short_if_the_kernel_has_killed_a_process(tmp_path):
    write(tmp_path, meminfo=PLENTY, vmstat="oom_kill 3\n")
    watch = MemoryWatch(tmp_path)
    assert not watch.was_short()
    write(tmp_path, vmstat="oom_kill 4\n")
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
