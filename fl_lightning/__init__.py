"""Federated learning under extreme heterogeneity, on PyTorch Lightning."""

__version__ = "0.1.0"
