"""The same trainer on many ranks."""
