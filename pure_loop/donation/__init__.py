"""Donation: an update writes to the memory of the State before it where no other reference to that memory exists.

Begin with :mod:`~pure_loop.donation.donation`: what a run knows of its own memory, and the decision. Beside it:

* :mod:`~pure_loop.donation.references`: the counting of references, and its calibration. No module outside this folder
  counts references or knows what a count means.
* :mod:`~pure_loop.donation.consumer`: whether the loop that reads a stream rebinds its variable to the next State.
* :mod:`~pure_loop.donation.owned`: how a State is handed over.
* :mod:`~pure_loop.donation.request`: how a script asks its driver to count.

Modules here import States, the engine, optimizers and what those import; no loop, driver, compiler or checkpoint.
"""
