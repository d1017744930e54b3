"""Quantised formats and what computes with them."""
