"""Members: many models in one State, each as if it was trained alone.

May import ``state``, ``schedules`` and what is below. Begin with ``stacking.py``, which takes a State apart into those
of its members and puts States together. ``each.py`` gives each member a value of its own, and ``turns.py`` knows whose
turn it is. What a State says of its members is :mod:`pure_loop.membership`.
"""
