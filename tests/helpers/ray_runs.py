"""Trains on real Ray clusters of this machine, and writes what happened into ``FOLDER/found.json``.

    python -m helpers.ray_runs SCENARIO FOLDER

A process of its own, as Ray starts threads, sockets and processes that outlive its shutdown for a
moment.
"""

import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import ray
import ray.train
import torch
from ray.cluster_utils import Cluster
from ray.train import FailureConfig, RunConfig, ScalingConfig, WorkerGroupError
from ray.train.torch import TorchTrainer
from torch.utils.data import TensorDataset

from evener import ConfigError, Ddp, DdpConfig
from evener.ray import EvenerConfig, join_actor, load_checkpoint, report_commits
from helpers.limits import wait_until

NUM_SAMPLES, BATCH_SIZE = 240, 24
#: Longest wait for what a quiet machine does in seconds: a cluster starts dozens of processes.
WAIT_S = 400.0
#: A file with what a scenario has found.
FOUND = "found.json"
#: A file that ends the run.
ENOUGH = "enough"


def train(config: dict[str, Any]) -> None:
    """What each worker runs."""
    torch.manual_seed(0)
    x = torch.randn(NUM_SAMPLES, 6)
    model = torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.Tanh(), torch.nn.Linear(5, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    options = DdpConfig(partition_ratios=config.get("ratios"))
    folder = Path(config["folder"])
    log = (folder / f"{os.getpid()}.jsonl").open("a", buffering=1)

    def note(**what: Any) -> None:
        log.write(json.dumps({"t": time.time(), "pid": os.getpid(), **what}) + "\n")

    with Ddp.setup(model, optimizer, devices="cpu", config=options, quiet=True) as ddp:
        dataset, steps = TensorDataset(x, x.sum(1, keepdim=True)), config.get("max_steps")
        loader = ddp.loader(dataset, batch_size=BATCH_SIZE, max_steps=steps)
        loaded = "every" in config and load_checkpoint(ddp)
        note(started=os.environ.get("EVENER_MEMBER", ""), loaded=loaded)
        ddp.on_commit(
            lambda result: note(
                window=result.window,
                epoch=result.epoch,
                positions=result.committed,
                shares=[record.samples for record in result.ranks],
            )
        )
        if "every" in config:
            report_commits(ddp, every=config["every"])
        for epoch in ddp.epochs(config["epochs"]):
            for inputs, targets in loader.epoch(epoch):
                ddp.backward(torch.nn.functional.mse_loss(model(inputs), targets))
                time.sleep(config.get("sample_s", 0.0) * len(inputs))
                ddp.step()
                if ddp.window == config.get("fails_at"):
                    raise OSError("the disk is full")
                if (folder / ENOUGH).exists():
                    ddp.stop()
    note(model=[number for p in model.parameters() for number in p.flatten().tolist()])
    log.close()


@contextmanager
def cluster(*labels: str) -> Iterator[None]:
    """A Ray cluster with a node for each label; the first has two CPUs, the others one."""
    nodes = Cluster()
    try:
        for label in labels:
            is_head = nodes.head_node is None
            extra = {"include_dashboard": False} if is_head else {}
            nodes.add_node(
                num_cpus=2 if is_head else 1,
                object_store_memory=80 * 2**20,
                labels={"kind": label},
                **extra,
            )
        ray.init(address=nodes.address)
        yield
    finally:
        ray.shutdown()
        nodes.shutdown()


def trainer(folder: Path, labels: Sequence[str], team: EvenerConfig, **config: Any) -> TorchTrainer:
    """A trainer with a worker for each label."""
    return TorchTrainer(
        train,
        train_loop_config={"folder": str(folder), **config},
        torch_config=team,
        scaling_config=ScalingConfig(
            num_workers=len(labels), label_selector=[{"kind": label} for label in labels]
        ),
        run_config=RunConfig(
            name="run",
            storage_path=str(folder / "storage"),
            failure_config=FailureConfig(max_failures=config.get("max_failures", 0)),
        ),
    )


def noted(folder: Path) -> list[dict[str, Any]]:
    """What workers have noted, oldest first."""
    lines = [line for path in folder.glob("*.jsonl") for line in path.read_text().splitlines()]
    return sorted(map(json.loads, lines), key=lambda one: float(one["t"]))


def one_process(folder: Path, **config: Any) -> list[float]:
    """The parameters that one process without Ray arrives at."""
    alone = folder / "alone"
    alone.mkdir()
    train({"folder": str(alone), **config})
    return noted(alone)[-1]["model"]


def fixed(folder: Path) -> dict[str, Any]:
    """Three unequal workers fail; two resume from the checkpoint."""
    config = {"epochs": 2, "every": 4}
    with cluster("fast", "slow"):
        unequal = {**config, "ratios": [3.0, 3.0, 1.0], "fails_at": 15}
        try:
            trainer(folder, ["slow", "fast", "fast"], EvenerConfig(), **unequal).fit()
        except WorkerGroupError as error:
            failure = str(error)
        try:
            join_actor(train, name="nobody")
        except ConfigError as error:
            unknown = str(error)
        found = {"before": noted(folder), "failure": failure, "unknown": unknown}
        for path in folder.glob("*.jsonl"):
            path.unlink()
        result = trainer(folder, ["fast", "slow"], EvenerConfig(), **config).fit()
    alone = one_process(folder, epochs=2)
    return {**found, "after": noted(folder), "metrics": result.metrics, "alone": alone}


def elastic(folder: Path) -> dict[str, Any]:
    """One of three workers is killed and replaced, beside an actor that joined."""
    config = {"epochs": 1000, "every": 40, "sample_s": 0.01}
    team = EvenerConfig(min_workers=1, max_workers=4, name="team")
    run = trainer(folder, ["a", "b", "c"], team, **config, max_failures=2)

    def windows(since: float, *pids: int) -> list[dict[str, Any]]:
        return [
            one
            for one in noted(folder)
            if "window" in one and one["t"] > since and (not pids or one["pid"] in pids)
        ]

    def started() -> dict[str, int]:
        return {one["started"]: one["pid"] for one in noted(folder) if "started" in one}

    def await_that(condition: Callable[[], object]) -> None:
        wait_until(lambda: fitting.done() or condition(), WAIT_S)

    def await_members(number: int) -> None:
        await_that(lambda: len({one["pid"] for one in windows(0.0)}) == number)

    def checkpoints() -> int:
        return len([*folder.glob("storage/run/checkpoint_*")])

    with cluster("a", "b", "c"), ThreadPoolExecutor() as pool:
        fitting = pool.submit(run.fit)
        try:
            await_members(3)
            extra = join_actor(train, run.train_loop_config, name="team", num_cpus=1)
            await_members(4)
            before = started()
            victim = next(pid for name, pid in before.items() if name.startswith("ray/1/"))
            os.kill(victim, signal.SIGKILL)
            killed_t = time.time()
            await_members(5)
            (new,) = (name for name in started() if name not in before)
            joined_t = windows(killed_t, started()[new])[0]["t"]
            actors = ray.util.list_named_actors(all_namespaces=True)
            (name,) = (one["name"] for one in actors if one["namespace"] == "evener")
            ray.kill(ray.get_actor(name, namespace="evener"), no_restart=False)
            reports = checkpoints()
            await_that(lambda: checkpoints() > reports)
        finally:
            (folder / ENOUGH).touch()
        result = fitting.result()
        ray.get(extra)
    (folder / ENOUGH).unlink()
    last = max(one["window"] for one in windows(0.0))
    meanwhile = [one["window"] for one in windows(killed_t) if one["t"] < joined_t]
    return {
        "notes": noted(folder),
        "before": before,
        "new": new,
        "join_s": joined_t - killed_t,
        "meanwhile": len({*meanwhile}),
        "metrics": result.metrics,
        "alone": one_process(folder, epochs=1000, max_steps=last + 1),
    }


SCENARIOS = {one.__name__: one for one in (fixed, elastic)}


if __name__ == "__main__":
    folder = Path(sys.argv[2])
    (folder / FOUND).write_text(json.dumps(SCENARIOS[sys.argv[1]](folder)))
