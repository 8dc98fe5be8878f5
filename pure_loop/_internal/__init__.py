"""Helpers that several folders share and that know nothing of training: no State, no event, no loop.

:mod:`~pure_loop._internal.torch_private` is the gate for private names of torch: no other module that eager code
imports names one. Begin reading there. Modules here import torch and :mod:`pure_loop.errors`, and nothing else of the
package.
"""
