"""What ranks with GPUs say of how they exchange."""

from dataclasses import replace

from evener.team.backends import ExchangeFacts

ON_GPU = ExchangeFacts(
    backend="auto",
    policy="sync",
    host="here",
    local_world_size=2,
    num_gpus=2,
    device="cuda:0",
    vendor="NVIDIA",
    gpu="GPU-0",
    nccl="2.29",
)
OTHER_GPU = replace(ON_GPU, device="cuda:1", gpu="GPU-1")
ON_CPU = replace(ON_GPU, device="cpu", vendor="", gpu="", nccl="")
