"""PyTorch without its compiler: products, convolution, attention, gradients, streams, graphs, a small GPT, and the end of memory."""

import report

torch = report.modules("torch")
import torch.nn.functional as F  # noqa: E402

if not torch.cuda.is_available():
    report.skip("torch finds no CUDA device")
DEVICE = torch.device("cuda:0")
wait = torch.cuda.synchronize


def digest(tensor):
    """Numbers that differ if the tensor does: mean, spread, and some elements."""
    flat = tensor.detach().float().flatten()
    some = flat[:: max(1, flat.numel() // 8)][:8]
    return [flat.mean().item(), flat.std().item(), *some.tolist()]


def numbers(*shape, kind=torch.float32):
    return torch.randn(*shape, generator=generator, device="cpu").to(DEVICE, kind)


generator = torch.Generator(device="cpu")
generator.manual_seed(1)
torch.manual_seed(1)

with report.part("device"):
    properties = torch.cuda.get_device_properties(0)
    report.result("name", properties.name)
    report.result("capability", list(torch.cuda.get_device_capability(0)))
    report.result("multiprocessors", properties.multi_processor_count)
    free, total = torch.cuda.mem_get_info()
    report.line(memory={"free": free, "total": total})
    report.note("total_memory of the properties", properties.total_memory)

for kind, size, tolerance in ((torch.float32, 2048, 1e-3), (torch.bfloat16, 4096, 2e-2), (torch.float16, 4096, 1e-2)):
    word = str(kind).removeprefix("torch.")
    with report.part(f"product {word}"):
        a, b = numbers(size, size, kind=kind), numbers(size, size, kind=kind)
        report.result(f"product {word}", digest(a @ b), tolerance)
        report.timed(f"product {word} {size}", lambda: a @ b, wait)
        del a, b

with report.part("convolution"):
    image, filters = numbers(16, 64, 64, 64), numbers(128, 64, 3, 3)
    report.result("convolution", digest(F.conv2d(image, filters, padding=1)), 5e-3)
    report.timed("convolution", lambda: F.conv2d(image, filters, padding=1), wait)

with report.part("attention"):
    query, key, value = (numbers(4, 16, 1024, 64, kind=torch.bfloat16) for _ in range(3))
    attend = lambda: F.scaled_dot_product_attention(query, key, value, is_causal=True)
    report.result("attention", digest(attend()), 2e-2)
    report.timed("attention", attend, wait)

with report.part("gradients"):
    weights = numbers(512, 512).requires_grad_()
    loss = torch.tanh(numbers(256, 512) @ weights).square().mean()
    loss.backward()
    report.result("gradients", digest(weights.grad), 1e-3)

with report.part("small steps"):
    small = numbers(64)

    def small_steps():
        total = small
        for _ in range(200):
            total = total * 1.0001 + 0.5
        return total

    report.result("small steps", digest(small_steps()), 1e-5)
    report.timed("200 pairs of small kernels", small_steps, wait)

with report.part("streams"):
    first, second = torch.cuda.Stream(), torch.cuda.Stream()
    source = numbers(1 << 20)
    wait()
    with torch.cuda.stream(first):
        left = source * 2
        event = first.record_event()
    with torch.cuda.stream(second):
        second.wait_event(event)
        right = left + 1
    second.synchronize()
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    source.sum()
    end.record()
    end.synchronize()
    report.result("streams", bool(torch.equal(right, source * 2 + 1)))
    report.result("time between events is positive", begin.elapsed_time(end) > 0)

with report.part("pinned copies"):
    pinned = torch.empty(64 << 20, dtype=torch.uint8, pin_memory=True)
    pinned.copy_(torch.arange(64 << 20, dtype=torch.int64).remainder_(251).to(torch.uint8))
    onto = torch.empty_like(pinned, device=DEVICE)
    onto.copy_(pinned, non_blocking=True)
    back = torch.empty_like(pinned, pin_memory=True)
    back.copy_(onto, non_blocking=True)
    wait()
    report.result("pinned copies", bool(torch.equal(pinned, back)))
    report.timed("copy of 64 MiB to the device", lambda: onto.copy_(pinned, non_blocking=True), wait)
    report.timed("copy of 64 MiB from the device", lambda: back.copy_(onto, non_blocking=True), wait)
    del pinned, onto, back

with report.part("graphs"):
    static = numbers(1024, 1024)
    warm = torch.cuda.Stream()
    warm.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(warm):
        for _ in range(3):
            output = torch.relu(static @ static) * 0.01
    torch.cuda.current_stream().wait_stream(warm)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = torch.relu(static @ static) * 0.01
    graph.replay()
    report.result("graphs", digest(output), 1e-3)
    report.timed("replay of a graph", graph.replay, wait)
    del graph


class Block(torch.nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.before, self.between = torch.nn.LayerNorm(width), torch.nn.LayerNorm(width)
        self.mix, self.out = torch.nn.Linear(width, 3 * width), torch.nn.Linear(width, width)
        self.wide, self.narrow = torch.nn.Linear(width, 4 * width), torch.nn.Linear(4 * width, width)

    def forward(self, x):
        batch, length, width = x.shape
        parts = self.mix(self.before(x)).view(batch, length, 3, self.heads, width // self.heads)
        query, key, value = parts.permute(2, 0, 3, 1, 4)
        seen = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(seen.transpose(1, 2).reshape(batch, length, width))
        return x + self.narrow(F.gelu(self.wide(self.between(x))))


class Gpt(torch.nn.Module):
    def __init__(self, letters=256, width=384, blocks=6, heads=6, length=256):
        super().__init__()
        self.letters, self.places = torch.nn.Embedding(letters, width), torch.nn.Embedding(length, width)
        self.blocks = torch.nn.Sequential(*(Block(width, heads) for _ in range(blocks)))
        self.last, self.head = torch.nn.LayerNorm(width), torch.nn.Linear(width, letters)

    def forward(self, letters):
        places = torch.arange(letters.shape[1], device=letters.device)
        return self.head(self.last(self.blocks(self.letters(letters) + self.places(places))))


with report.part("training"):
    torch.manual_seed(2)
    model = Gpt().to(DEVICE)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    # A text with a rule that a model can learn.
    text = (torch.arange(16 * 257).remainder(97) * 2 + 1).view(16, 257).to(DEVICE)

    def train():
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast("cuda", dtype=torch.bfloat16):
            scores = model(text[:, :-1])
            loss = F.cross_entropy(scores.flatten(0, 1), text[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        return loss

    losses = [train().item() for _ in range(20)]
    report.result("losses of a small GPT", losses, 5e-2)
    report.result("the loss falls", losses[-1] < losses[0])
    report.timed("training step of a small GPT", train, wait)
    del model, optimizer

with report.part("out of memory"):
    torch.cuda.empty_cache()
    total = torch.cuda.mem_get_info()[1]
    pieces, raised = [], False
    try:
        for _ in range(40):
            pieces.append(torch.empty(total // 32, dtype=torch.uint8, device=DEVICE))
    except torch.OutOfMemoryError:
        raised = True
    report.result("the end of memory raises an error", raised)
    report.note("part of the memory that was allocated", len(pieces) / 32)
    pieces.clear()
    torch.cuda.empty_cache()
    a = numbers(512, 512)
    report.result("product after the end of memory", digest(a @ a), 1e-3)

report.done()
