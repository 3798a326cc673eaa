"""The bare driver interface through cuda-python: version, device, context, memory, a module from PTX, a launch."""

import array
import ctypes
import random
import struct
import sys

from cuda.bindings import driver

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


def check(result):
    error, *values = result
    if error != driver.CUresult.CUDA_SUCCESS:
        raise RuntimeError(f"{error!r}")
    return values[0] if len(values) == 1 else tuple(values)


check(driver.cuInit(0))
version = check(driver.cuDriverGetVersion())
device = check(driver.cuDeviceGet(0))
name = check(driver.cuDeviceGetName(64, device)).split(b"\0")[0].decode()
print(f"driver {version}, {check(driver.cuDeviceGetCount())} device(s), {name}")

context = check(driver.cuDevicePrimaryCtxRetain(device))
check(driver.cuCtxSetCurrent(context))
module = check(driver.cuModuleLoadData(PTX))
function = check(driver.cuModuleGetFunction(module, b"scale"))
stream = check(driver.cuStreamCreate(0))

COUNT = 1000
random.seed(1)
values = array.array("f", (random.randrange(-1000, 1000) / 8 for _ in range(COUNT)))
results = array.array("f", bytes(4 * COUNT))
memory = check(driver.cuMemAlloc(4 * COUNT))
check(driver.cuMemcpyHtoDAsync(memory, values.buffer_info()[0], 4 * COUNT, stream))
arguments = ((int(memory), COUNT, 2.5), (ctypes.c_void_p, ctypes.c_uint, ctypes.c_float))
check(driver.cuLaunchKernel(function, (COUNT + 127) // 128, 1, 1, 128, 1, 1, 0, stream, arguments, 0))
check(driver.cuMemcpyDtoHAsync(results.buffer_info()[0], memory, 4 * COUNT, stream))
check(driver.cuStreamSynchronize(stream))
wrong = sum(result != 2.5 * value for value, result in zip(values, results))
print(f"scaled {COUNT} numbers, {wrong} wrong, first {struct.pack('f', results[0]).hex()}")

check(driver.cuMemFree(memory))
check(driver.cuStreamDestroy(stream))
check(driver.cuModuleUnload(module))
check(driver.cuDevicePrimaryCtxRelease(device))
print("PASS" if wrong == 0 else "FAIL")
sys.exit(wrong != 0)
