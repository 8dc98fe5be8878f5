"""``pl.rehearse``: all arguments of a call of ``fit`` tried on one batch per phase, with nothing trained or written.

May import everything but ``testing``. Begin with ``rehearse.py``: the phases in order, of which each collects its own
failures. ``passes.py`` runs the loop itself on the batches, ``standins.py`` has what stands for callbacks and loggers.
"""
