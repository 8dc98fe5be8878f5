"""One module a library, in the order of the table; each has an ``ADAPTER``."""

from bench.performance.operators import let_torchvision_be_imported

__all__ = ["MODULES"]

MODULES = ("ours", "by_hand", "careful", "lightning", "hf_trainer", "hf_accelerate", "ignite", "composer", "keras")

let_torchvision_be_imported()
