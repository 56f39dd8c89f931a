"""Lightning callbacks of one local fit: how training changes while it goes on."""

from fl_lightning.callbacks.cosine_rate import CosineRate
from fl_lightning.callbacks.generator_pretraining import GeneratorPretraining
from fl_lightning.callbacks.grpo_stage_switch import GRPOStageSwitch
from fl_lightning.callbacks.sparse_inversion import SparseModelInversion

__all__ = ["CosineRate", "GRPOStageSwitch", "GeneratorPretraining", "SparseModelInversion"]
