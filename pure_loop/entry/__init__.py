"""The functions that users call: ``fit``, ``evaluate``, ``predict``, ``drive``, ``explain``.

May import everything but ``testing``. Begin with ``fit.py``: arguments are read, checked and turned into a stream.
"""
