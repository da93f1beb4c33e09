"""Importances and gates that were tried and are not in the package. See README.md for what they did."""
