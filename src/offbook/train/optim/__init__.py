"""Optimizers: Muon for matrices, AdamW for the rest."""
