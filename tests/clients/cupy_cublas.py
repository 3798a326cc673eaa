"""cuBLAS through CuPy: the routines whose kernels it brings as PTX."""

import sys

import cupy
import numpy
from cupy import cublas

random = numpy.random.default_rng(1)
vector = random.standard_normal(512, dtype=numpy.float32)
matrix = random.standard_normal((512, 512), dtype=numpy.float32)
ours, many = cupy.asarray(vector), cupy.asarray(matrix, order="F")
stream = cupy.cuda.Stream(non_blocking=True)
wrong = 0
# cuBLAS has a workspace for each stream.
for name, where in ("default stream", cupy.cuda.Stream.null), ("own stream", stream):
    where.use()
    product = cupy.empty_like(ours)
    cublas.gemv("T", 1.0, many, ours, 0.0, product)
    for routine, result, expected in (
        ("dot", cublas.dot(ours, ours), vector @ vector),
        ("asum", cublas.asum(ours), abs(vector).sum()),
        ("nrm2", cublas.nrm2(ours), numpy.linalg.norm(vector)),
        ("gemv", product, matrix.T @ vector),
        ("geam", cublas.geam("N", "T", 1.0, many, 2.0, many), matrix + 2 * matrix.T),
    ):
        good = numpy.allclose(cupy.asnumpy(result), expected, rtol=1e-3, atol=1e-3)
        print(f"{routine} on the {name}: {'right' if good else 'WRONG'}")
        wrong += not good
print("FAIL" if wrong else "PASS")
sys.exit(wrong)
