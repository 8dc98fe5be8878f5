"""Members: many models in one State, each as if it was trained alone.

``record.py`` is what a State says of its members, ``stacking.py`` takes a State apart into theirs and puts States
together. ``each.py`` gives each member a value of its own, and ``turns.py`` knows whose turn it is.
"""
