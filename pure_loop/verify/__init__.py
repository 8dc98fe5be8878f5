"""``fit(verify=)``: a batch that is computed twice, and what the two computations differ in.

May import ``loop`` and what is below. Begin with ``verify.py``: it runs a due batch again. ``leaves.py`` finds the
leaves in which two States differ, and ``difference.py`` says it in words.
"""
