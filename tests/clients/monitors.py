"""Monitors: nvidia-ml-py's calls agree with the driver to the byte, gpustat and nvitop show what they say.

monitors.py [QUOTA [PID]]: with QUOTA bytes there are to be, beside the process PID, which holds memory of the GPU."""

import ctypes
import json
import os
import re
import subprocess
import sys

import nvitop
import pynvml

MIB = 1 << 20
HELD = 32 * MIB
QUOTA, OTHERS = [int(word) for word in sys.argv[1:2]], {int(word) for word in sys.argv[2:]}
ALL = OTHERS | {os.getpid()}
driver = ctypes.CDLL("libcuda.so.1")


def check(what, holds):
    if not holds:
        print("not so:", what)
        print("FAIL")
        sys.exit(1)


def cuda(name, *arguments):
    result = getattr(driver, name)(*arguments)
    check(f"{name}: {result}", result == 0)


def refused(call, *arguments):
    try:
        call(*arguments)
    except pynvml.NVMLError_NotSupported:
        return True
    return False


def driver_memory():
    free, total = ctypes.c_size_t(), ctypes.c_size_t()
    cuda("cuMemGetInfo_v2", ctypes.byref(free), ctypes.byref(total))
    return total.value, total.value - free.value


def processes(gpu):
    listed = pynvml.nvmlDeviceGetComputeRunningProcesses(gpu)
    return {process.pid: process.usedGpuMemory for process in listed}


def monitor(*words):
    done = subprocess.run([sys.executable, "-m", *words], capture_output=True, text=True, timeout=200)
    check(f"{words} {done}", done.returncode == 0)
    return done.stdout


pynvml.nvmlInit()
count, context, version = ctypes.c_int(), ctypes.c_void_p(), ctypes.c_int()
cuda("cuDriverGetVersion", ctypes.byref(version))
check("version of CUDA", pynvml.nvmlSystemGetCudaDriverVersion() == version.value)
cuda("cuInit", 0)
cuda("cuDeviceGetCount", ctypes.byref(count))
check("count", pynvml.nvmlDeviceGetCount() == count.value)
for index in range(count.value):
    gpu = pynvml.nvmlDeviceGetHandleByIndex(index)
    name, uuid = ctypes.create_string_buffer(96), ctypes.create_string_buffer(16)
    cuda("cuDeviceGetName", name, 96, index)
    cuda("cuDeviceGetUuid_v2", uuid, index)
    check("name", pynvml.nvmlDeviceGetName(gpu) == name.value.decode())
    check("uuid", pynvml.nvmlDeviceGetUUID(gpu).replace("-", "") == "GPU" + uuid.raw.hex())
    found = pynvml.nvmlDeviceGetHandleByUUID(pynvml.nvmlDeviceGetUUID(gpu))
    check("found by uuid", pynvml.nvmlDeviceGetIndex(found) == index)
    check("index", pynvml.nvmlDeviceGetIndex(gpu) == index)
    bus = ctypes.create_string_buffer(32)
    cuda("cuDeviceGetPCIBusId", bus, 32, index)
    check("bus id", pynvml.nvmlDeviceGetPciInfo(gpu).busId.endswith(bus.value.decode()))
    check("no instances", refused(pynvml.nvmlDeviceGetMigMode, gpu) or pynvml.nvmlDeviceGetMigMode(gpu) == [0, 0])
    for call in (pynvml.nvmlDeviceGetPowerUsage, pynvml.nvmlDeviceGetFanSpeed, pynvml.nvmlDeviceGetSerial):
        check(call.__name__, refused(call, gpu))
print(count.value, "device(s),", pynvml.nvmlDeviceGetName(gpu))

gpu = pynvml.nvmlDeviceGetHandleByIndex(0)
check(f"no other process is there: {processes(gpu)}", processes(gpu).keys() == OTHERS)
cuda("cuDevicePrimaryCtxRetain", ctypes.byref(context), 0)
cuda("cuCtxSetCurrent", context)
before = driver_memory()
address = ctypes.c_uint64()
cuda("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(HELD))
total, used = driver_memory()
check(f"quota {total}", QUOTA in ([], [total]))
check("the driver counts", used >= before[1] + HELD)
old, new = (pynvml.nvmlDeviceGetMemoryInfo(gpu, version) for version in (None, pynvml.nvmlMemory_v2))
check(f"memory {old} {total} {used}", (old.total, old.used, old.free) == (total, used, total - used))
check(f"memory {new} {total} {used}", (new.total, new.used, new.free) == (total, used, total - used))
listed = processes(gpu)
check(f"processes {listed}", listed.keys() == ALL and listed[os.getpid()] >= HELD)
check(f"processes {listed} {used}", sum(listed.values()) == used)
print("agrees with the driver to the byte")

import gpustat  # changes pynvml, and so comes last

shown = gpustat.new_query().gpus[0]
check(f"gpustat {shown}", (shown.memory_total, shown.memory_used) == (total // MIB, used // MIB))
check(f"gpustat {shown}", {process["pid"] for process in shown.processes} == ALL)
shown = nvitop.Device.all()[0]
check(f"nvitop {shown}", (shown.memory_total(), shown.memory_used()) == (total, used))
check(f"nvitop {shown}", {pid: one.gpu_memory() for pid, one in shown.processes().items()} == listed)
print("gpustat and nvitop say the same")

# As programs of their own, which hold no memory and see the use of others.
shown = json.loads(monitor("gpustat", "--json"))["gpus"][0]
check(f"gpustat {shown}", (shown["memory.total"], shown["memory.used"]) == (total // MIB, used // MIB))
check(f"gpustat {shown}", {process["pid"] for process in shown["processes"]} == ALL)
shown = monitor("nvitop", "-1", "--ascii")
sizes = re.search(r"([0-9.]+)MiB / +([0-9.]+)MiB", shown)
check(shown, sizes and [int(float(size)) for size in sizes.groups()] == [used // MIB, total // MIB])
rows = [line.split()[1:3] for line in shown.splitlines()]
check(shown, all(["0", str(process)] in rows for process in ALL))
print("gpustat and nvitop run")

cuda("cuMemFree_v2", address)
cuda("cuDevicePrimaryCtxRelease_v2", 0)
check("no other process is left", processes(gpu).keys() == OTHERS)
pynvml.nvmlShutdown()
print("PASS")
