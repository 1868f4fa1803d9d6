"""Datasets that every machine has, and how they become microbatches."""
