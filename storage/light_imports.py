"""Imports of transformers without what no language model needs: each process of a run pays for them."""

from __future__ import annotations


def import_losses() -> None:
    """Import the losses of transformers without scipy, which only those of object detectors use.

    It costs a quarter of a second and 37 MB where a model is loaded. Call it before anything imports a model.
    """
    from transformers import utils
    from transformers.utils import import_utils

    real = import_utils.is_scipy_available
    for module in (utils, import_utils):
        module.is_scipy_available = lambda: False
    try:
        import transformers.loss.loss_utils  # noqa: F401
    finally:
        for module in (utils, import_utils):
            module.is_scipy_available = real
