"""Convolutional networks for small images: LeNet-5, VGG-11 and residual networks with a stem for small images.

Each is built from ``(input_shape, num_classes, ...)`` and returns class scores. Blocks are torchvision's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Literal

from torch import Tensor, nn

Norm = Literal["batch", "group"]


class LeNet5(nn.Sequential):
    """Two 5 x 5 convolutions with max-pooling and three fully connected layers, with ReLU (after LeCun et al., 1998).

    Widths as in federated learning code: 64 and 64 channels, 384 and 192 hidden units (797,962 parameters on CIFAR-10).

    Args:
        input_shape: (C, H, W) of an image. Without padding H and W must be at least 16, with padding 2 at least 4.
        num_classes: Width of the output.
        width: Channels of both convolutions, at least 1; the hidden layers have 6 and 3 times as many units.
        padding: Zeros around the input of each convolution, in [0, 2]. 2 keeps the size, for images smaller than 16.
    """

    def __init__(self, input_shape: tuple[int, int, int], num_classes: int, width: int = 64, padding: int = 0) -> None:
        _at_least("width", width, 1)
        if not 0 <= padding <= 2:
            raise ValueError(f"padding is {padding}; it must be in [0, 2]")
        channels, *size = input_shape
        for _ in range(2):
            size = [(side + 2 * padding - 4) // 2 for side in size]
        if min(size) < 1:
            raise ValueError(
                f"input_shape is {tuple(input_shape)}; with padding {padding} height and width must be at least "
                f"{16 - 6 * padding}" + (", padding 2 takes images from 4 x 4" if padding < 2 else "")
            )
        super().__init__(
            nn.Conv2d(channels, width, 5, padding=padding),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(width, width, 5, padding=padding),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(width * size[0] * size[1], 6 * width),
            nn.ReLU(),
            nn.Linear(6 * width, 3 * width),
            nn.ReLU(),
            nn.Linear(3 * width, num_classes),
        )

    def forward(self, input: Tensor) -> Tensor:
        """Class scores (B, num_classes) of images (B, C, H, W)."""
        return super().forward(input)


class VGG11(nn.Sequential):
    """The eight convolutions of VGG-11 (Simonyan and Zisserman, 2015, configuration A), without normalisation or dropout.

    Args:
        input_shape: (C, H, W) of an image; H and W at least 32, as five poolings halve them.
        num_classes: Width of the output.
        hidden: Widths of the hidden fully connected layers. FedNSAM's code: [100] for 10 classes, [256] for 100.
    """

    def __init__(self, input_shape: tuple[int, int, int], num_classes: int, hidden: Sequence[int] = (100,)) -> None:
        from torchvision.models.vgg import cfgs, make_layers

        channels, height, width = input_shape
        if min(height, width) < 32:
            raise ValueError(f"input_shape is {tuple(input_shape)}; height and width must be at least 32")
        features = make_layers(cfgs["A"])
        if channels != 3:
            features[0] = nn.Conv2d(channels, 64, 3, padding=1)
        layers: list[nn.Module] = []
        units = 512 * (height // 32) * (width // 32)
        for size in hidden:
            layers += [nn.Linear(units, size), nn.ReLU()]
            units = size
        super().__init__(features, nn.Flatten(), *layers, nn.Linear(units, num_classes))

    def forward(self, input: Tensor) -> Tensor:
        """Class scores (B, num_classes) of images (B, C, H, W)."""
        return super().forward(input)


class _ResNet(nn.Sequential):
    """Basic residual blocks behind a 3 x 3 stem of stride 1 without pooling (He et al., 2016, section 4.2).

    Args:
        input_shape: (C, H, W) of an image.
        num_classes: Width of the output.
        stages: Number of stages; each but the first halves the image and doubles the channels.
        blocks: Blocks of a stage.
        width: Channels of the first stage, at least 1.
        norm: Normalisation after every convolution.
        groups: Groups of channels of a GroupNorm; must divide ``width``.
    """

    def __init__(
        self,
        input_shape: tuple[int, int, int],
        num_classes: int,
        stages: int,
        blocks: int,
        width: int,
        norm: Norm,
        groups: int,
    ) -> None:
        from torchvision.models.resnet import BasicBlock, conv1x1, conv3x3

        _at_least("width", width, 1)
        if norm not in ("batch", "group"):
            raise ValueError(f"norm is {norm!r}; allowed: 'batch', 'group'")
        if norm == "group" and (groups < 1 or width % groups):
            raise ValueError(f"groups is {groups}; it must be at least 1 and divide width {width}")
        layer: Callable[[int], nn.Module] = nn.BatchNorm2d if norm == "batch" else partial(nn.GroupNorm, groups)
        layers: list[nn.Module] = [conv3x3(input_shape[0], width), layer(width), nn.ReLU()]
        channels = width
        for stage in range(stages):
            out = width * 2**stage
            for block in range(blocks):
                stride = 2 if stage and not block else 1
                # Option B: a projection where the shape changes.
                shortcut = nn.Sequential(conv1x1(channels, out, stride), layer(out)) if stride > 1 else None
                layers.append(BasicBlock(channels, out, stride, shortcut, norm_layer=layer))
                channels = out
        super().__init__(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, num_classes))
        for module in self.modules():
            if isinstance(module, nn.Conv2d):  # as torchvision's ResNet
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, input: Tensor) -> Tensor:
        """Class scores (B, num_classes) of images (B, C, H, W)."""
        return super().forward(input)


class ResNet18(_ResNet):
    """ResNet-18 (He et al., 2016) for small images: a 3 x 3 stem of stride 1, no max-pooling; 11.17 M parameters.

    FedNSAM's code has two: "BN" (but GroupNorm in the stem; here BatchNorm throughout) and "GN" with 2 groups.

    Args:
        input_shape: (C, H, W) of an image.
        num_classes: Width of the output.
        width: Channels of the first of four stages, at least 1.
        norm: "batch" has running statistics, which the method averages; "group" has none.
        groups: Groups of channels of a GroupNorm; must divide ``width``.
    """

    def __init__(
        self,
        input_shape: tuple[int, int, int],
        num_classes: int,
        width: int = 64,
        norm: Norm = "batch",
        groups: int = 2,
    ) -> None:
        super().__init__(input_shape, num_classes, 4, 2, width, norm, groups)


class ResNet8(_ResNet):
    """Three stages of one basic block each, for runs on few cores: 78 k parameters at width 16.

    Args:
        input_shape: (C, H, W) of an image; from 8 x 8.
        num_classes: Width of the output.
        width: Channels of the first of three stages, at least 1.
        norm: "batch" has running statistics, which the method averages; "group" has none.
        groups: Groups of channels of a GroupNorm; must divide ``width``.
    """

    def __init__(
        self,
        input_shape: tuple[int, int, int],
        num_classes: int,
        width: int = 16,
        norm: Norm = "group",
        groups: int = 2,
    ) -> None:
        super().__init__(input_shape, num_classes, 3, 1, width, norm, groups)


class ResNet50(nn.Module):
    """ResNet-50 (He et al., 2016), torchvision's; up to 64 pixels with a 3 x 3 stem of stride 1 and no max-pooling (23.5 M).

    Args:
        input_shape: (C, H, W) of an image.
        num_classes: Width of the output.
    """

    def __init__(self, input_shape: tuple[int, int, int], num_classes: int) -> None:
        from torchvision.models import resnet50

        super().__init__()
        self.body = resnet50(weights=None, num_classes=num_classes)
        channels, *size = input_shape
        if max(size) <= 64:
            self.body.conv1 = nn.Conv2d(channels, 64, 3, padding=1, bias=False)
            self.body.maxpool = nn.Identity()
        elif channels != 3:
            self.body.conv1 = nn.Conv2d(channels, 64, 7, stride=2, padding=3, bias=False)

    def forward(self, input: Tensor) -> Tensor:
        """Class scores (B, num_classes) of images (B, C, H, W)."""
        return self.body(input)


def _at_least(name: str, value: int, least: int) -> None:
    if value < least:
        raise ValueError(f"{name} is {value}; it must be at least {least}")
