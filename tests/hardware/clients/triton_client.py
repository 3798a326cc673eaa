"""Triton: a sum of vectors and a product with tiles, both compiled at run time. It needs a C compiler for its launcher."""

import report

torch, triton, tl = report.modules("torch", "triton", "triton.language")
if not torch.cuda.is_available():
    report.skip("torch finds no CUDA device")
wait = torch.cuda.synchronize


@triton.jit
def add(left, right, out, count, BLOCK: tl.constexpr):
    places = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = places < count
    tl.store(out + places, tl.load(left + places, mask=inside) + tl.load(right + places, mask=inside), mask=inside)


@triton.jit
def product(left, right, out, size, BLOCK: tl.constexpr):
    rows = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK, BLOCK), dtype=tl.float32)
    for begin in range(0, size, BLOCK):
        inner = begin + tl.arange(0, BLOCK)
        a = tl.load(left + rows[:, None] * size + inner[None, :])
        b = tl.load(right + inner[:, None] * size + columns[None, :])
        total += tl.dot(a, b)
    tl.store(out + rows[:, None] * size + columns[None, :], total)


with report.part("add"):
    count = 1_000_003
    left = torch.arange(count, dtype=torch.float32).cuda()
    right, out = torch.ones_like(left), torch.empty_like(left)
    grid = (triton.cdiv(count, 1024),)
    add[grid](left, right, out, count, BLOCK=1024)
    report.result("add", bool(torch.equal(out, left + right)))
    report.timed("add", lambda: add[grid](left, right, out, count, BLOCK=1024), wait)

with report.part("product"):
    size = 1024
    generator = torch.Generator().manual_seed(1)
    left, right = (torch.randn(size, size, generator=generator).half().cuda() for _ in range(2))
    out = torch.empty(size, size, device="cuda")
    grid = (size // 64, size // 64)
    product[grid](left, right, out, size, BLOCK=64)
    report.result("product", bool(torch.allclose(out, left.float() @ right.float(), atol=0.5, rtol=1e-2)))
    report.timed("product", lambda: product[grid](left, right, out, size, BLOCK=64), wait)

report.done()
