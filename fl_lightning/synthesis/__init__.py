"""Making data: samplers of diffusion models."""
