"""A convolutional GAN that draws crosses, on one device."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

NOISE = 8


def crosses(num_samples: int) -> TensorDataset:
    """Crosses at random places of 8 x 8 points, with noise for the generator beside each."""
    generator = torch.Generator().manual_seed(4)
    images = -torch.ones(num_samples, 1, 8, 8)
    places = torch.randint(2, 6, (num_samples, 2), generator=generator)
    for image, (row, column) in zip(images, places.tolist(), strict=True):
        image[0, row, :] = image[0, :, column] = 1.0
    return TensorDataset(images, torch.randn(num_samples, NOISE, 1, 1, generator=generator))


def adversarial_loss(logits: Tensor, label: float) -> Tensor:
    return F.binary_cross_entropy_with_logits(logits, torch.full_like(logits, label))


def main(epochs: int = 2) -> tuple[nn.Module, float]:
    torch.manual_seed(0)
    generator = nn.Sequential(
        nn.ConvTranspose2d(NOISE, 16, 4), nn.GroupNorm(4, 16), nn.ReLU(),
        nn.ConvTranspose2d(16, 1, 4, stride=2, padding=1), nn.Tanh(),
    )  # fmt: skip
    discriminator = nn.Sequential(
        nn.Conv2d(1, 16, 4, stride=2, padding=1), nn.LeakyReLU(0.2), nn.Conv2d(16, 1, 4)
    )
    opt_g = torch.optim.Adam(generator.parameters(), lr=2e-3, betas=(0.5, 0.999))
    opt_d = torch.optim.Adam(discriminator.parameters(), lr=2e-3, betas=(0.5, 0.999))
    loader = DataLoader(crosses(160), batch_size=20, shuffle=True)
    loss_g = torch.zeros(())

    for _ in range(epochs):
        for real, noise in loader:
            # The discriminator learns to tell real images from drawn ones.
            discriminator.zero_grad()
            fake = generator(noise)
            loss_real = adversarial_loss(discriminator(real), 1.0)
            loss_real.backward()
            loss_fake = adversarial_loss(discriminator(fake.detach()), 0.0)
            loss_fake.backward()
            opt_d.step()
            # The generator learns to deceive it.
            generator.zero_grad()
            loss_g = adversarial_loss(discriminator(fake), 1.0)
            loss_g.backward()
            opt_g.step()
    print(f"loss of the generator {loss_g.item():.3f}")
    return nn.ModuleList([generator, discriminator]), loss_g.item()


if __name__ == "__main__":
    main()
