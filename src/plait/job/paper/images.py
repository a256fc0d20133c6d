"""ResNet-50/101/152 and AlexNet on paper, as their papers draw them (ResNet with the stride in the 3 x 3 layer).

In: a shape. Out: an `nn.Module` from images [samples, 3, rows, columns] to logits.
"""

from torch import Tensor, nn
from torch.nn import functional as F

from plait.job.paper.shapes import ImageShape

_RESNET_BLOCKS = {50: (3, 4, 6, 3), 101: (3, 4, 23, 3), 152: (3, 8, 36, 3)}


class Bottleneck(nn.Module):
    """1 x 1, 3 x 3, 1 x 1, added to the input."""

    def __init__(self, channels: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, width, 1, bias=False)
        self.norm1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, stride=stride, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(width)
        self.conv3 = nn.Conv2d(width, 4 * width, 1, bias=False)
        self.norm3 = nn.BatchNorm2d(4 * width)
        same = stride == 1 and channels == 4 * width
        self.shortcut: nn.Module = (
            nn.Identity()
            if same
            else nn.Sequential(
                nn.Conv2d(channels, 4 * width, 1, stride=stride, bias=False), nn.BatchNorm2d(4 * width)
            )
        )

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.norm1(self.conv1(x)))
        y = F.relu(self.norm2(self.conv2(y)))
        return F.relu(self.norm3(self.conv3(y)) + self.shortcut(x))


class ResNet(nn.Module):
    """Four groups of bottleneck blocks."""

    def __init__(self, shape: ImageShape) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 64, 7, stride=2, padding=3, bias=False)
        self.norm = nn.BatchNorm2d(64)
        self.pool = nn.MaxPool2d(3, stride=2, padding=1)
        blocks = []
        channels = 64
        for group, num_blocks in enumerate(_RESNET_BLOCKS[shape.layers]):
            for index in range(num_blocks):
                blocks.append(Bottleneck(channels, 64 << group, 2 if group and not index else 1))
                channels = 256 << group
        self.blocks = nn.ModuleList(blocks)
        self.head = nn.Linear(channels, shape.classes)

    def forward(self, images: Tensor) -> Tensor:
        x = self.pool(F.relu(self.norm(self.conv(images))))
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(x.mean((2, 3)))
        return logits


class AlexNet(nn.Module):
    """Five convolutions and three wide layers, on one device."""

    def __init__(self, shape: ImageShape) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(3, 64, 11, stride=4, padding=2), nn.ReLU(), nn.MaxPool2d(3, stride=2),
            nn.Conv2d(64, 192, 5, padding=2), nn.ReLU(), nn.MaxPool2d(3, stride=2),
            nn.Conv2d(192, 384, 3, padding=1), nn.ReLU(),
            nn.Conv2d(384, 256, 3, padding=1), nn.ReLU(),
            nn.Conv2d(256, 256, 3, padding=1), nn.ReLU(), nn.MaxPool2d(3, stride=2),
        )  # fmt: skip
        rows = shape.image
        for kernel, stride, padding in ((11, 4, 2), (3, 2, 0), (3, 2, 0), (3, 2, 0)):
            rows = (rows + 2 * padding - kernel) // stride + 1
        self.classifier = nn.Sequential(
            nn.Dropout(shape.dropout), nn.Linear(256 * rows * rows, 4096), nn.ReLU(),
            nn.Dropout(shape.dropout), nn.Linear(4096, 4096), nn.ReLU(),
            nn.Linear(4096, shape.classes),
        )  # fmt: skip

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.classifier(self.features(images).flatten(1))
        return logits
