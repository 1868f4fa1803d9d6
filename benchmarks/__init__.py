"""Comparisons with other ways of training, beside which this package is measured.

Nothing in the package imports these; they are run from a checkout.
"""
