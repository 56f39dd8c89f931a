"""Where client work runs. The loop does not know which engine it has."""
