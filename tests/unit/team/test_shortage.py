from evener.team import host


def test_processes_that_the_kernel_has_killed_are_counted(tmp_path, monkeypatch):
    monkeypatch.setattr(host, "_PROC", tmp_path)
    assert host.count_kills() == 0, "without /proc nothing is known"
    (tmp_path / "vmstat").write_text("nr_free_pages 7\noom_kill 3\n")
    assert host.count_kills() == 3
