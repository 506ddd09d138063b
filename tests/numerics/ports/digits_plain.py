"""A convolutional network that reads digits of a pocket calculator, on one device."""

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

SEGMENTS = ["1110111", "0010010", "1011101", "1011011", "0111010",
            "1101011", "1101111", "1010010", "1111111", "1111011"]  # fmt: skip


def draw(digit: int) -> torch.Tensor:
    """The digit on 10 x 6 points."""
    on = [float(s) for s in SEGMENTS[digit]]
    image = torch.zeros(10, 6)
    image[0, 1:5], image[4, 1:5], image[9, 1:5] = on[0], on[3], on[6]
    image[1:4, 0], image[1:4, 5] = on[1], on[2]
    image[5:9, 0], image[5:9, 5] = on[4], on[5]
    return image


def noisy_digits(num_samples: int, seed: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(10, (num_samples,), generator=generator)
    images = torch.stack([draw(int(label)) for label in labels])
    noise = torch.randn(images.shape, generator=generator)
    return TensorDataset((images + 0.3 * noise).unsqueeze(1), labels)


def main(epochs: int = 2) -> tuple[nn.Module, float]:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(1, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.ReLU(), nn.Flatten(),
        nn.Linear(8 * 6 * 2, 10),
    ).to(device)  # fmt: skip
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.7)
    train_loader = DataLoader(noisy_digits(300, seed=1), batch_size=32, shuffle=True)
    test_loader = DataLoader(noisy_digits(200, seed=2), batch_size=100)

    for _ in range(epochs):
        model.train()
        for images, labels in train_loader:
            images, labels = images.to(device), labels.to(device)
            optimizer.zero_grad()
            loss = F.cross_entropy(model(images), labels)
            loss.backward()
            optimizer.step()
        scheduler.step()

    model.eval()
    correct = 0
    with torch.no_grad():
        for images, labels in test_loader:
            predicted = model(images.to(device)).argmax(1)
            correct += int((predicted == labels.to(device)).sum())
    accuracy = correct / 200
    print(f"accuracy {accuracy:.3f}")
    return model, accuracy


if __name__ == "__main__":
    main()
