"""Networks that a YAML can name; CLIP is in `fl_lightning.models.clip`, which imports open_clip when it is used."""

from fl_lightning.models.mlp import MLP

__all__ = ["MLP"]
