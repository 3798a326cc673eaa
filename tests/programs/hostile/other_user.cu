// Exports device memory, and has two processes open it: one of the same user, and one that has become user 1001. Prints the result
// of each. For root.
#include "../check.h"
#include <dlfcn.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

// Opens the descriptor that it gets; its exit status is the error.
static int opens(int input, uid_t user) {
    // While its files can still be read.
    if (dlopen("libcuda.so.1", RTLD_NOW | RTLD_GLOBAL) == nullptr) return 200;
    if (setresuid(user, user, user) != 0 || prctl(PR_SET_DUMPABLE, 1) != 0) return 201;
    cudaIpcMemHandle_t handle;
    if (read(input, &handle, sizeof handle) != sizeof handle) return 202;
    if (cudaFree(nullptr) != cudaSuccess) return 203;
    int *memory, value = 0;
    cudaError_t error = cudaIpcOpenMemHandle((void **)&memory, handle, cudaIpcMemLazyEnablePeerAccess);
    if (error != cudaSuccess) return error;
    if (cudaMemcpy(&value, memory, sizeof value, cudaMemcpyDeviceToHost) != cudaSuccess) return 204;
    return value == 4711 ? 0 : 205;
}

int main() {
    int output[2];
    pid_t processes[2];
    for (int which = 0; which < 2; which++) {
        int ends[2];
        if (pipe(ends) != 0) return 1;
        fflush(stdout);
        processes[which] = fork();
        if (processes[which] == 0) _exit(opens(ends[0], which == 0 ? getuid() : 1001));
        close(ends[0]);
        output[which] = ends[1];
    }
    int *memory, value = 4711;
    cudaIpcMemHandle_t handle;
    CHECK(cudaMalloc(&memory, sizeof value));
    CHECK(cudaMemcpy(memory, &value, sizeof value, cudaMemcpyHostToDevice));
    CHECK(cudaIpcGetMemHandle(&handle, memory));
    for (int which = 0; which < 2; which++) {
        if (write(output[which], &handle, sizeof handle) != sizeof handle) return 1;
        int status = -1;
        waitpid(processes[which], &status, 0);
        printf("%s user: %d\n", which == 0 ? "same" : "other", WIFEXITED(status) ? WEXITSTATUS(status) : -1);
    }
    return 0;
}
