"""The user's module as a value: its structure without numbers, and modules that hold the tensors of a State.

May import: ``errors``, ``frozendict``, ``random``, ``_internal``. Begin with ``model.py``: a ``ModelDef`` is the
``model`` of a State. ``instance.py`` is a private module that holds tensors during a call, ``checks.py`` refuses what
can't be trained; each other file is about one kind of thing in a module: ``buffers``, ``declared`` parameters,
``leaves`` of autograd, the ``tree`` of submodules, and what a copy shares with the original (``structure``).
"""
