// The text of a failed assertion appears on the program's own standard error when the program waits for the kernel, and text
// printed before it on standard output. The error stays.
// Usage: assertion         the assertion fails in a child, whose standard error is printed
//        assertion fail    fails
#include "check.h"
#include <cassert>
#include <cstring>
#include <string>
#include <sys/wait.h>
#include <unistd.h>

// The text contains the file's name as given to the compiler.
#line 1 "assertion.cu"
__global__ void positive(const int *numbers)
{
    if (threadIdx.x == 0 && threadIdx.y == 0) printf("numbers are looked at\n");
    assert(numbers[threadIdx.y * blockDim.x + threadIdx.x] > 0);
}

static int fail()
{
    const int host[8] = {1, 2, 3, 0, 5, 6, -7, 8};
    int *numbers;
    CHECK(cudaMalloc(&numbers, sizeof host));
    CHECK(cudaMemcpy(numbers, host, sizeof host, cudaMemcpyHostToDevice));
    positive<<<1, dim3(4, 2)>>>(numbers);
    printf("launch %d\n", (int)cudaGetLastError());
    // The kernel ends before the program waits for it.
    while (cudaStreamQuery(nullptr) == cudaErrorNotReady) usleep(1000);
    printf("wait %d\n", (int)cudaDeviceSynchronize());
    printf("wait again %d\n", (int)cudaDeviceSynchronize());
    printf("free %d\n", (int)cudaFree(numbers));
    fflush(stdout);
    return 0;
}

int main(int argc, char **)
{
    if (argc > 1) return fail();
    int ends[2];
    fflush(stdout);
    if (pipe(ends) != 0) return verdict(false);
    pid_t child = fork();
    if (child == 0) {
        dup2(ends[1], 2);
        execl("/proc/self/exe", "assertion", "fail", (char *)nullptr);
        _exit(126);
    }
    close(ends[1]);
    std::string text;
    char piece[256];
    for (ssize_t length; (length = read(ends[0], piece, sizeof piece)) > 0;) text.append(piece, length);
    int status = -1;
    if (child < 0 || waitpid(child, &status, 0) != child) status = -1;
    printf("standard error:\n%s", text.c_str());
    const char *expected = "assertion.cu:4: void positive(const int *): block: [0,0,0], thread: [3,0,0] Assertion "
                           "`numbers[threadIdx.y * blockDim.x + threadIdx.x] > 0` failed.\n"
                           "assertion.cu:4: void positive(const int *): block: [0,0,0], thread: [2,1,0] Assertion "
                           "`numbers[threadIdx.y * blockDim.x + threadIdx.x] > 0` failed.\n";
    return verdict(status == 0 && text == expected);
}
