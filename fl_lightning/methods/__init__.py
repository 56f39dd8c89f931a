"""The methods, by name."""

from fl_lightning.methods.averaging import FedAvg
from fl_lightning.methods.bank_distillation import BankDistillation
from fl_lightning.methods.base import ClientProgram, Fit, Method, Predict, Reply, Result
from fl_lightning.methods.co_boosting import CoBoosting
from fl_lightning.methods.deep_inversion import DeepInversion
from fl_lightning.methods.dense import DENSE
from fl_lightning.methods.distillation import NoiseDistillation
from fl_lightning.methods.ensemble import OneShotEnsemble
from fl_lightning.methods.fedacg import FedACG
from fl_lightning.methods.fedasam import FedASAM
from fl_lightning.methods.fedcm import FedCM
from fl_lightning.methods.feddtl import FedDTL
from fl_lightning.methods.feddyn import FedDyn
from fl_lightning.methods.federated_factory import FederatedFactory
from fl_lightning.methods.fedftg import FedFTG
from fl_lightning.methods.fedgamma import FedGAMMA
from fl_lightning.methods.fedgloss import FedGloSS
from fl_lightning.methods.fedlesam import FedLESAM
from fl_lightning.methods.fedmitr import FedMITR
from fl_lightning.methods.fednesterov import FedNesterov
from fl_lightning.methods.fednsam import FedNSAM
from fl_lightning.methods.fedprox import FedProx
from fl_lightning.methods.fedsam import FedSAM
from fl_lightning.methods.fedsmoo import FedSMOO
from fl_lightning.methods.fedspeed import FedSpeed
from fl_lightning.methods.local_only import LocalOnly
from fl_lightning.methods.mofedsam import MoFedSAM
from fl_lightning.methods.scaffold import SCAFFOLD

__all__ = [
    "DENSE",
    "SCAFFOLD",
    "BankDistillation",
    "ClientProgram",
    "CoBoosting",
    "DeepInversion",
    "FedACG",
    "FedASAM",
    "FedAvg",
    "FedCM",
    "FedDTL",
    "FedDyn",
    "FedFTG",
    "FedGAMMA",
    "FedGloSS",
    "FedLESAM",
    "FedMITR",
    "FedNSAM",
    "FedNesterov",
    "FedProx",
    "FedSAM",
    "FedSMOO",
    "FedSpeed",
    "FederatedFactory",
    "Fit",
    "LocalOnly",
    "Method",
    "MoFedSAM",
    "NoiseDistillation",
    "OneShotEnsemble",
    "Predict",
    "Reply",
    "Result",
]
