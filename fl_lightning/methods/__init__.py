"""The methods, by name."""

from fl_lightning.methods.averaging import FedAvg
from fl_lightning.methods.base import ClientProgram, Fit, Method, Predict, Reply, Result
from fl_lightning.methods.feddtl import FedDTL
from fl_lightning.methods.fedprox import FedProx
from fl_lightning.methods.local_only import LocalOnly

__all__ = ["ClientProgram", "FedAvg", "FedDTL", "FedProx", "Fit", "LocalOnly", "Method", "Predict", "Reply", "Result"]
