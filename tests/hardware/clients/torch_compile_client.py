"""torch.compile: generated kernels for a chain of operations and for a small network with gradients. It needs a C compiler."""

import report

torch, triton = report.modules("torch", "triton")
if not torch.cuda.is_available():
    report.skip("torch finds no CUDA device")
wait = torch.cuda.synchronize
torch.manual_seed(1)


def digest(tensor):
    flat = tensor.detach().float().flatten()
    return [flat.mean().item(), flat.std().item(), *flat[:: max(1, flat.numel() // 8)][:8].tolist()]


with report.part("chain"):
    x = torch.randn(1 << 20, generator=torch.Generator().manual_seed(1)).cuda()
    chain = lambda x: torch.sin(x) * torch.cos(x) + torch.exp(-x * x)
    compiled = torch.compile(chain)
    report.result("chain", digest(compiled(x)), 1e-4)
    report.result("chain as without the compiler", bool(torch.allclose(compiled(x), chain(x), atol=1e-4)))
    report.timed("compiled chain", lambda: compiled(x), wait)

with report.part("network"):
    network = torch.nn.Sequential(torch.nn.Linear(256, 512), torch.nn.GELU(), torch.nn.LayerNorm(512), torch.nn.Linear(512, 16)).cuda()
    batch = torch.randn(128, 256, generator=torch.Generator().manual_seed(2)).cuda()
    compiled_network = torch.compile(network)

    def step():
        network.zero_grad()
        loss = compiled_network(batch).square().mean()
        loss.backward()
        return loss

    report.result("loss", step().item(), 1e-3)
    report.result("gradients", digest(network[0].weight.grad), 1e-2)
    report.timed("compiled network with gradients", step, wait)

with report.part("graphs"):
    compiled = torch.compile(lambda x: torch.relu(x @ x).sum(0), mode="reduce-overhead")
    x = torch.randn(512, 512, generator=torch.Generator().manual_seed(3)).cuda()
    for _ in range(3):
        reduced = compiled(x).clone()
    report.result("compiled with graphs", digest(reduced), 1e-3)
    report.timed("compiled with graphs", lambda: compiled(x), wait)

report.done()
