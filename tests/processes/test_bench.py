"""``evener bench`` as users start it, with seconds instead of minutes."""

import json

from helpers.pretraining import Lab


def test_a_bench_measures_and_recommends(lab: Lab) -> None:
    lab.configure(epochs=1000)
    ended = lab.sandbox.evener(
        *("bench", "run.yaml", "--policies", "sync", "--backends", "gloo"),
        *("--minutes", "0.05", "--rounds", "1", "--nproc", "1", "--set", "optimizer.lr=0.01"),
    ).end()
    assert ended.code == 0, ended.err
    folder = lab.folder / "runs" / "bench"
    written = json.loads((folder / "bench.json").read_text())
    assert written["recommended"] == "sync/gloo"
    (candidate,) = written["candidates"]
    assert candidate["speed"] > 0
    assert candidate["loss_by_time"] < 6
    assert f"page: {folder}/bench.html" in ended.err
    assert '"recommended":"sync/gloo"' in (folder / "bench.html").read_text()
    assert all(len(line) <= 80 for line in (folder / "bench.txt").read_text().splitlines())
    # The trial was ended after its time, not after its thousand epochs, and keeps no checkpoint.
    trial = folder / "trials" / "sync-gloo-1"
    assert '"stopped"' in (trial / "events.jsonl").read_text()
    assert not (trial / "checkpoints").exists()
