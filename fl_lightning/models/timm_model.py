"""Any classifier of timm, whole or with LoRA (Hu et al., 2022) from peft."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn


class TimmModel(nn.Module):
    """A model of timm by name. With LoRA only the low-rank factors and the classifier train; the rest never leaves home.

    Pixels are not normalised here: the task's ``mean`` and ``std`` must be those of the weights.

    Args:
        input_shape: (C, H, W) of an image.
        num_classes: Width of the output.
        name: For example "vit_base_patch16_224.augreg_in21k"; see ``timm.list_models()``.
        pretrained: Load timm's weights (fetched once). Otherwise all weights are random, those that LoRA freezes too.
        img_size: Height and width in pixels that a transformer is built for; null takes its own (224). Pretrained position
            embeddings are resampled to it.
        lora_rank: r, at least 0; 0 trains every parameter. FedNSAM's code: 16.
        lora_alpha: Numerator of the scale alpha / r, above 0. FedNSAM's code: 32.
        lora_dropout: Dropout before A, in [0, 1). FedNSAM's code: 0.05.
        lora_targets: Ends of the names of the layers that get factors. FedNSAM's code: qkv and proj, of attention.
    """

    def __init__(
        self,
        input_shape: tuple[int, int, int],
        num_classes: int,
        name: str,
        pretrained: bool = False,
        img_size: int | None = None,
        lora_rank: int = 0,
        lora_alpha: float = 32.0,
        lora_dropout: float = 0.05,
        lora_targets: Sequence[str] = ("attn.qkv", "attn.proj"),
    ) -> None:
        super().__init__()
        if lora_rank < 0:
            raise ValueError(f"lora_rank is {lora_rank}; it must be at least 0")
        if not lora_alpha > 0:
            raise ValueError(f"lora_alpha is {lora_alpha}; it must be above 0")
        if not 0 <= lora_dropout < 1:
            raise ValueError(f"lora_dropout is {lora_dropout}; it must be in [0, 1)")
        self.model = create_timm(input_shape, num_classes, name, pretrained, img_size)
        if lora_rank:
            self._adapt(lora_rank, lora_alpha, lora_dropout, list(lora_targets))

    def _adapt(self, rank: int, alpha: float, dropout: float, targets: list[str]) -> None:
        """Freeze all but the classifier and add LoRA factors, B = 0."""
        from peft import LoraConfig, inject_adapter_in_model

        names = [name for name, _ in self.model.named_modules()]
        for target in targets:  # peft passes over one that fits nothing, as long as another fits
            if not any(f".{name}".endswith(f".{target}") for name in names):
                raise ValueError(f"lora_targets has {target!r}; each must end a layer's name, such as {names[-1]!r}")
        if not targets:
            raise ValueError("lora_targets is empty; it must name at least one layer")
        self.model.requires_grad_(False)
        config = LoraConfig(r=rank, lora_alpha=alpha, lora_dropout=dropout, target_modules=targets)
        inject_adapter_in_model(config, self.model)
        self.model.get_classifier().requires_grad_(True)

    def forward(self, input: Tensor) -> Tensor:
        """Class scores (B, num_classes) of images (B, C, H, W)."""
        return self.model(input)


def create_timm(
    input_shape: tuple[int, int, int],
    num_classes: int,
    name: str,
    pretrained: bool = False,
    img_size: int | None = None,
) -> Any:
    """A model of timm that takes images of ``input_shape``; arguments as for `TimmModel`.

    Raises:
        ValueError: An unknown name, or images of another size than the model takes.
    """
    import timm

    if not timm.is_model(name):
        raise ValueError(f"name is {name!r}; it must be a model of timm, see timm.list_models()")
    options = {} if img_size is None else {"img_size": img_size}
    try:
        model = timm.create_model(name, pretrained, num_classes=num_classes, in_chans=input_shape[0], **options)
    except TypeError as error:
        if img_size is None:
            raise
        raise ValueError(f"img_size is {img_size}; {name} takes none, it must be null ({error})") from error
    if model.default_cfg.get("fixed_input_size"):
        side = img_size or model.default_cfg["input_size"][-1]
        if tuple(input_shape[1:]) != (side, side):
            raise ValueError(
                f"input_shape is {tuple(input_shape)}; {name} takes {side} x {side}: set data.image_size: {side}, "
                f"or the network's img_size"
            )
    return model
