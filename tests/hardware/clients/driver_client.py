"""The driver's interface without any package: version, device, memory, a kernel from PTX, a copy, an event."""

import array
import ctypes
import zlib

import report

PTX = b"""
.version 7.0
.target sm_80
.address_size 64
.visible .entry scale(.param .u64 to, .param .u32 count, .param .f32 factor)
{
    .reg .pred %p;
    .reg .b32 %r<6>;
    .reg .f32 %f<3>;
    .reg .b64 %a<3>;
    ld.param.u64 %a0, [to];
    ld.param.u32 %r0, [count];
    ld.param.f32 %f0, [factor];
    mov.u32 %r1, %ctaid.x;
    mov.u32 %r2, %ntid.x;
    mov.u32 %r3, %tid.x;
    mad.lo.u32 %r4, %r1, %r2, %r3;
    setp.ge.u32 %p, %r4, %r0;
    @%p ret;
    cvta.to.global.u64 %a1, %a0;
    mad.wide.u32 %a2, %r4, 4, %a1;
    ld.global.f32 %f1, [%a2];
    mul.f32 %f2, %f1, %f0;
    st.global.f32 [%a2], %f2;
    ret;
}
"""
COUNT = 1 << 16

try:
    cuda = ctypes.CDLL("libcuda.so.1")
except OSError as error:
    report.skip(error)


def call(name, *arguments):
    code = getattr(cuda, name)(*arguments)
    if code != 0:
        raise RuntimeError(f"{name} returned {code}")


def number(kind, name, *arguments):
    """The number that a call writes to its first argument."""
    value = kind()
    call(name, ctypes.byref(value), *arguments)
    return value


call("cuInit", 0)
device = number(ctypes.c_int, "cuDeviceGet", 0)
context = number(ctypes.c_void_p, "cuDevicePrimaryCtxRetain", device)
call("cuCtxSetCurrent", context)
report.line(versions={"driver": str(number(ctypes.c_int, "cuDriverGetVersion").value)})

with report.part("memory"):
    free, total = ctypes.c_size_t(), ctypes.c_size_t()
    call("cuMemGetInfo_v2", ctypes.byref(free), ctypes.byref(total))
    report.line(memory={"free": free.value, "total": total.value})

with report.part("device"):
    name = ctypes.create_string_buffer(96)
    call("cuDeviceGetName", name, 96, device)
    report.result("name", name.value.decode())
    numbers = [number(ctypes.c_int, "cuDeviceGetAttribute", attribute, device).value for attribute in (75, 76, 16, 10)]
    report.result("capability, multiprocessors, warp", numbers)

with report.part("scale"):
    module = number(ctypes.c_void_p, "cuModuleLoadData", PTX)
    function = number(ctypes.c_void_p, "cuModuleGetFunction", module, b"scale")
    memory = number(ctypes.c_uint64, "cuMemAlloc_v2", ctypes.c_size_t(4 * COUNT))
    values = array.array("f", (place % 1000 / 8 for place in range(COUNT)))
    bytes_of = lambda numbers: ctypes.c_void_p(numbers.buffer_info()[0])
    arguments = (ctypes.c_uint64(memory.value), ctypes.c_uint(COUNT), ctypes.c_float(2.5))
    pointers = (ctypes.c_void_p * 3)(*(ctypes.cast(ctypes.byref(one), ctypes.c_void_p) for one in arguments))

    def step():
        call("cuMemcpyHtoD_v2", memory, bytes_of(values), ctypes.c_size_t(4 * COUNT))
        call("cuLaunchKernel", function, COUNT // 256, 1, 1, 256, 1, 1, 0, None, pointers, None)

    step()
    results = array.array("f", bytes(4 * COUNT))
    call("cuMemcpyDtoH_v2", bytes_of(results), memory, ctypes.c_size_t(4 * COUNT))
    report.result("scaled numbers", all(2.5 * value == result for value, result in zip(values, results)))
    report.result("checksum", f"{zlib.crc32(results.tobytes()):08x}")
    report.timed("copy and kernel", step, lambda: call("cuCtxSynchronize"))

with report.part("out of memory"):
    refused = cuda.cuMemAlloc_v2(ctypes.byref(ctypes.c_uint64()), ctypes.c_size_t(1 << 45))
    report.result("code of a huge allocation", refused)

report.done()
