"""The main job on GPUs, alone and beside a CPU."""

from pathlib import Path

import pytest
import torch

from helpers.lineage import check_exactly_once
from helpers.pretraining import NUM_SAMPLES, Lab


@pytest.mark.gpu
@pytest.mark.parametrize("beside", [0, 1])
def test_gpus_pretrain_alone_and_beside_a_cpu(tmp_path: Path, beside: int) -> None:
    num_gpus = torch.cuda.device_count() if beside else 1
    size = num_gpus + beside
    lab = Lab(tmp_path)
    try:
        # Measured, a CPU may turn out too slow for any share.
        options = ("--set", "epochs=1", "--set", f"speed_hint={[1] * size}")
        running = lab.command("run.yaml", "--nproc", str(size), "--name", "there", *options)
        ended = running.end()
        assert ended.code == 0, ended.err
        run = lab.path_of("there")
        ranks = run.summary["ranks"]
        kinds = [rank["device"].partition(":")[0] for rank in ranks]
        assert kinds == ["cuda"] * num_gpus + ["cpu"] * beside
        assert all(rank["samples"] > 0 for rank in ranks)
        check_exactly_once(run.events, num_samples=NUM_SAMPLES)
    finally:
        lab.close()
