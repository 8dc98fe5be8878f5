"""``fit(verify=)``: a batch that is computed twice, and what the two computations differ in.

May import ``loop`` and what is below. Begin with ``verify.py``: it runs a due batch again, and says in words where the
two runs differ. ``leaves.py`` finds the leaves that do.
"""
