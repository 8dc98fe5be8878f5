"""The loop: scripts that yield events, and the driver that runs them.

May import ``stages`` and what is below; knows no concrete algorithm, callback, engine or compiler. Begin with
``training.py``: ``fit`` there reads as the specification, with ``batch.py`` for what happens in each microbatch, and
``driver.py`` runs it event by event.
"""
