"""Other libraries as ways of training: Accelerate, Lightning Fabric and torchft.

They are no dependencies of evener. ``enter`` runs a benchmark in an environment of their own, which
is a folder inside the project's and sees the project's packages; so all libraries work with the
same torch, in the same processes.
"""

import argparse
import importlib.util
import logging
import os
import site
import subprocess
import sys
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from machine import ROOT
from models import mean_loss
from options import some_of
from rounds import TIMEOUT_S, Team
from torch import Tensor, nn
from ways import Setting, TunedDdp, Way

#: What is compared, and the versions for which this file is written: module and requirement.
PACKAGES = {
    "accelerate": ("accelerate", "accelerate==1.15.0"),
    "fabric": ("lightning_fabric", "lightning-fabric==2.6.6"),
    "torchft": ("torchft", "torchft==0.2.0"),
}


def add_libraries(parser: argparse.ArgumentParser) -> None:
    """The option that names those to be measured."""
    parser.add_argument(
        "--with",
        dest="libraries",
        type=some_of(PACKAGES),
        default=[],
        metavar="NAME,...",
        help=f"other libraries beside torch: {', '.join(PACKAGES)}",
    )


def missing(names: Sequence[str]) -> list[str]:
    """Those of the names in ``PACKAGES`` that cannot be imported here."""
    return [name for name in names if importlib.util.find_spec(PACKAGES[name][0]) is None]


def enter(names: Sequence[str]) -> None:
    """Goes on in an environment that has the libraries; makes it where it is not there yet.

    Says which of them cannot be installed, and does without.
    """
    folder = Path(sys.prefix) / "competitors"
    if Path(sys.prefix).name == folder.name or not missing(names):
        for name in missing(names):
            print(f"{name} is left out: it is not installed in {sys.prefix}")
        return
    python = folder / "bin" / "python"
    if not python.exists():
        make_environment(folder)
    for name in names:
        # One at a time: without a build for this Python, one fails, and not all.
        wanted = [PACKAGES[name][1], "-c", str(ROOT / "constraints.txt")]
        command = [str(python), "-m", "pip", "install", "--progress-bar", "off", *wanted]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            print(f"{' '.join(command)} failed:\n{done.stderr[-2000:]}")
    os.execv(python, [str(python), *sys.argv])


def make_environment(folder: Path) -> None:
    """A virtual environment that sees the packages of the present one, besides its own."""
    print(f"making {folder} for other libraries")
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    below = [path for path in site.getsitepackages() if path.startswith(sys.prefix)]
    lines = [f"import site; site.addsitedir({path!r})\n" for path in below]
    [own] = folder.glob("lib/python*/site-packages")
    (own / "project.pth").write_text("".join(lines), encoding="utf-8")


class Accelerate(TunedDdp):
    """Hugging Face Accelerate, its defaults, with a fused optimizer."""

    name = "accelerate"

    def wrap(self, model: nn.Module) -> nn.Module:
        """See ``TorchDdp``."""
        from accelerate import Accelerator

        self.accelerator = Accelerator(cpu=True)
        wrapped, self.optimizer = self.accelerator.prepare(model, self.optimizer)
        return wrapped

    def backward(self, loss: Tensor) -> None:
        """See ``TorchDdp``."""
        self.accelerator.backward(loss)


class Fabric(TunedDdp):
    """Lightning Fabric, its defaults, with a fused optimizer."""

    name = "fabric"

    def wrap(self, model: nn.Module) -> nn.Module:
        """See ``TorchDdp``."""
        from lightning_fabric import Fabric as LightningFabric

        self.fabric = LightningFabric(accelerator="cpu", devices=self.world_size, strategy="ddp")
        self.fabric.launch()
        wrapped, self.optimizer = self.fabric.setup(model, self.optimizer)
        return wrapped

    def backward(self, loss: Tensor) -> None:
        """See ``TorchDdp``."""
        self.fabric.backward(loss)


class LocalSgd(Way):
    """torchft's LocalSGD: each rank is a replica; parameters are averaged every some local steps.

    Faster ranks make more steps between two averagings, as its users can choose.
    """

    name = "torchft.local_sgd"
    ceiling = "ceiling.local"

    def __init__(self, team: Team, setting: Setting) -> None:
        super().__init__(team, setting)
        # Read by its Rust extension on import, which prints several lines per exchange without.
        os.environ.setdefault("RUST_LOG", "error")
        from torchft import Manager, ProcessGroupGloo
        from torchft.coordination import LighthouseServer

        logging.getLogger("torchft").setLevel(logging.ERROR)  # it warns that there is no NCCL

        slowest = min(setting.speeds)
        self.counts = [round(setting.anchor * speed / slowest) for speed in setting.speeds]
        timeout = timedelta(seconds=TIMEOUT_S)
        self.lighthouse, port = None, 0
        if team.rank == 0:
            self.lighthouse = LighthouseServer(
                bind="127.0.0.1:0", min_replicas=team.world_size, join_timeout_ms=60_000
            )
            port = int(self.lighthouse.address().rpartition(":")[2])
        # A replica of one rank has a store of its own.
        self.store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self.manager = Manager(
            pg=ProcessGroupGloo(timeout=timeout),
            state_dict=self.model.state_dict,
            load_state_dict=self.model.load_state_dict,
            min_replica_size=team.world_size,
            use_async_quorum=False,  # DiLoCo refuses another
            init_sync=False,  # all replicas begin with the same weights
            timeout=timeout,
            quorum_timeout=timeout,
            rank=0,
            world_size=1,
            store_addr="127.0.0.1",
            store_port=self.store.port,
            lighthouse_addr=f"http://127.0.0.1:{team.first(port)}",
            replica_id=f"rank{team.rank}",
            hostname="127.0.0.1",
        )
        # Before the hook that exchanges: an emulated rank is slow in computing.
        self.started = self.slowdown.start()
        self.optimizer.register_step_post_hook(lambda *_: self.slowdown.after(self.started))
        self.averaging = self.make_averaging(self.counts[team.rank])
        self.averaging.__enter__()

    def make_averaging(self, sync_every: int):
        """What averages, as a context manager on the optimizer."""
        from torchft.local_sgd import LocalSGD

        return LocalSGD(self.manager, self.model, self.optimizer, sync_every)

    def run(self, steps: int) -> float:
        """Trains for as many averagings as a turn of evener's local policies has windows."""
        self._train_window()
        windows = self.setting.local_windows
        with self.clock() as clock:
            for _ in range(windows):
                self._train_window()
        samples = windows * sum(self.counts) * self.setting.micro_batch_size
        return samples / max(seconds for [seconds] in self.team.gather([clock.elapsed_s]))

    def close(self) -> None:
        """See ``Way``."""
        self.averaging.__exit__(None, None, None)
        self.team.barrier()
        self.manager.shutdown()
        self.team.barrier()
        if self.lighthouse is not None:
            self.lighthouse.shutdown()

    def _train_window(self) -> None:
        """Makes the local steps between two averagings, and the second of these."""
        for step in range(self.counts[self.rank]):
            self.started = self.slowdown.start()
            mean_loss(self.model, self.batch(step, self.setting.micro_batch_size)).backward()
            self.update()


class DiLoCo(LocalSgd):
    """torchft's DiLoCo: averaged differences, which an outer optimizer applies."""

    name = "torchft.diloco"

    def make_averaging(self, sync_every: int):
        """See ``LocalSgd``."""
        from torchft.local_sgd import DiLoCo as TorchftDiLoCo

        outer = torch.optim.SGD(self.model.parameters(), lr=0.7, momentum=0.9, nesterov=True)
        return TorchftDiLoCo(
            self.manager,
            [self.model],
            self.optimizer,
            outer,
            sync_every,
            pin_memory=False,
            use_bucketization=True,  # the faster of the two
        )


def ways_of(name: str) -> list[type[Way]]:
    """The ways that a library in ``PACKAGES`` offers."""
    return {"accelerate": [Accelerate], "fabric": [Fabric], "torchft": [LocalSgd, DiLoCo]}[name]
