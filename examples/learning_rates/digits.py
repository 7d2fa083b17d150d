"""A small residual network that reads handwritten digits: 8 x 8 pixels of scikit-learn's package, no download."""

from __future__ import annotations

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F

from ..character_model.training import Problem

BATCH = 32
WIDTH = 16  # channels of the first block
SHIFT = 1  # pixels by which an image of a batch is moved at most, in each direction
HIGHEST = 16.0  # value of a pixel
# Every third image is trained on: with more the problem is solved before learning rates can be told apart.
TRAIN_EVERY = 3


class Block(nn.Module):
    def __init__(self, channels: int):
        super().__init__()
        self.conv1 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(channels)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(x + self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x))))))


class DigitModel(nn.Module):
    """Two blocks with a step between them that halves the image and doubles the channels."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(1, WIDTH, 3, padding=1, bias=False)
        self.layer1 = Block(WIDTH)
        self.down = nn.Conv2d(WIDTH, 2 * WIDTH, 3, stride=2, padding=1, bias=False)
        self.layer2 = Block(2 * WIDTH)
        self.head = nn.Linear(2 * WIDTH, 10)

    def forward(self, images: Tensor) -> Tensor:
        """Return logits (batch, 10) of images (batch, 1, 8, 8)."""
        x = self.layer2(self.down(self.layer1(self.stem(images))))
        return self.head(x.mean(dim=(2, 3)))


def digits() -> Problem:
    """Return the problem of the network; the loss is the cross entropy in nats per image."""
    read = load_digits()
    images, labels = torch.tensor(read.images / HIGHEST, dtype=torch.float32)[:, None], torch.tensor(read.target)
    train, held_out = for_training(images, labels), for_validation(images, labels)
    return Problem(
        model=DigitModel,
        batch=lambda generator: batch_of(*train, generator),
        loss=loss_of,
        validate=lambda model: loss_of(model, held_out).item(),
    )


def for_training(*tensors: Tensor) -> tuple[Tensor, ...]:
    return tuple(tensor[::TRAIN_EVERY] for tensor in tensors)


def for_validation(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Return what `for_training` leaves."""
    kept = torch.arange(len(tensors[0])) % TRAIN_EVERY != 0
    return tuple(tensor[kept] for tensor in tensors)


def batch_of(images: Tensor, labels: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Return BATCH random images (BATCH, 1, 8, 8), all moved by the same few pixels, and their labels (BATCH,)."""
    chosen = torch.randint(len(images), (BATCH,), generator=generator)
    down, right = torch.randint(2 * SHIFT + 1, (2,), generator=generator).tolist()
    padded = F.pad(images[chosen], (SHIFT,) * 4)
    height, width = images.shape[-2:]
    return padded[..., down : down + height, right : right + width], labels[chosen]


def loss_of(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    images, labels = batch
    return F.cross_entropy(model(images), labels)
