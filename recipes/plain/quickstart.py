"""A small CNN learns to read drawn digits: one process, plain PyTorch.

    python recipes/plain/quickstart.py [--smoke]

`recipes/quickstart.py` is the same script on every device of the machine; compare the two.
"""

import argparse

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

SEGMENTS = ("abcdef", "bc", "abdeg", "abcdg", "bcfg", "acdfg", "acdefg", "abc", "abcdefg", "abcdfg")
STROKES = {"a": (0, 0, 0, 4), "b": (0, 4, 4, 4), "c": (4, 4, 8, 4), "d": (8, 0, 8, 4)}
STROKES |= {"e": (4, 0, 8, 0), "f": (0, 0, 4, 0), "g": (4, 0, 4, 4)}


def draw_digits(count: int, seed: int) -> TensorDataset:
    """Noisy digits of seven segments, (count, 1, 12, 12), each somewhere else, and their labels."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(10, (count,), generator=generator)
    places = torch.randint(4, (count, 2), generator=generator)
    images = 0.5 * torch.randn(count, 1, 12, 12, generator=generator)
    for image, label, (top, left) in zip(images, labels, places.tolist(), strict=True):
        for segment in SEGMENTS[label]:
            up, west, down, east = STROKES[segment]
            image[0, top + up : top + down + 1, left + west : left + east + 1] += 1.5
    return TensorDataset(images, labels)


def network() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(32 * 3 * 3, 10),
    )


def accuracy(model: nn.Module, images: Tensor, labels: Tensor) -> float:
    with torch.no_grad():
        return float((model(images).argmax(dim=1) == labels).float().mean())


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--smoke", action="store_true", help="less of everything: a few seconds")
    args = parser.parse_args()
    torch.manual_seed(0)
    dataset = draw_digits(6000 if args.smoke else 20_000, seed=1)
    test = draw_digits(300, seed=2)

    model = network()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model.to(device)
    loader = DataLoader(dataset, batch_size=256, shuffle=True)
    for epoch in range(1 if args.smoke else 5):
        for images, labels in loader:
            loss = F.cross_entropy(model(images.to(device)), labels.to(device))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        images, labels = test.tensors
        score = accuracy(model, images.to(device), labels.to(device))
        print(f"epoch {epoch}: accuracy {score:.1%}")


if __name__ == "__main__":
    main()
