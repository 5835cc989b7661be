"""Fast twins of the elementwise work: one pass over memory where eager PyTorch makes a dozen.

``native`` compiles a page of C for the CPU, ``fused`` holds the Triton kernels for a GPU. Both are optional: their
functions decline what they cannot do, and the eager code beside them is what they are tested against.
"""
