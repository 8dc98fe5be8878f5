"""A CUDA device that computes on the CPU, for machines that have none: ``make test-simulated-gpu``.

Its tensors are torch's own, on ``cuda:0``; autograd, autocast, random numbers and pinned memory take the ways that they
take on a GPU. Each operator runs on the CPU, in the memory that the tensor has. It is strict where a GPU is: tensors
with dimensions don't meet those of another device (of numbers on the host it lets some through that a GPU doesn't), and
what makes the host wait, or can't be recorded as a CUDA graph, is an error where that is asked for. A copy from pinned
a copy that is not waited for reads it a second time later, when the host next waits or copies.

CUDA graphs are recorded and replayed by addresses. Which stream is current it knows thread by thread, but not what
waits for what on them. It says nothing of speed, of memory pools, of a second device, or of what is computed on a GPU
in another way.
"""
