"""The functions that users call: ``fit``, ``evaluate``, ``predict``, ``drive``, ``explain``.

May import everything but ``testing``. Begin with ``fit.py``: arguments are read and checked (``settings.py``), planned
(``plan.py``), bound to the loop and turned into a stream (``assembly.py``).
"""
