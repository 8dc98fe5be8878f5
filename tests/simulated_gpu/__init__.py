"""A CUDA device that computes on the CPU, for machines that have none: ``make test-simulated-gpu``.

Its tensors are torch's own, on ``cuda:0``; autograd, autocast, random numbers and pinned memory take the ways that they
take on a GPU. Each operator runs on the CPU, in the memory that the tensor has. It is strict where a GPU is: tensors of
two devices don't meet, and what makes the host wait, or can't be recorded as a CUDA graph, is an error where that is
asked for. It says nothing of speed, of streams, or of what is computed on a GPU in another way.
"""
