"""Distillation: a model learns from a frozen teacher."""
