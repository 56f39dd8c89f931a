"""Networks that a YAML can name; CLIP is in `fl_lightning.models.clip`. Libraries of models are imported when used."""

from fl_lightning.models.convnets import VGG11, LeNet5, ResNet8, ResNet18, ResNet50
from fl_lightning.models.edm2 import DiffusersUNet, EDM2UNet
from fl_lightning.models.mlp import MLP
from fl_lightning.models.sparse_vit import SparseViT
from fl_lightning.models.timm_model import TimmModel

__all__ = [
    "MLP",
    "VGG11",
    "DiffusersUNet",
    "EDM2UNet",
    "LeNet5",
    "ResNet8",
    "ResNet18",
    "ResNet50",
    "SparseViT",
    "TimmModel",
]
