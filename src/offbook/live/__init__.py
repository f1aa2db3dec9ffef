"""The cycle from real use to a better model: sessions, reactions, training, a gate, a trial, and the way back."""
