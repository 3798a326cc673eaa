// The device's claims about access of kernels to pageable host memory, by the numbers of their attributes.
#include "../check.h"

int main() {
    int pageable = -1, tables = -1;
    CHECK(cudaDeviceGetAttribute(&pageable, cudaDevAttrPageableMemoryAccess, 0));
    CHECK(cudaDeviceGetAttribute(&tables, cudaDevAttrPageableMemoryAccessUsesHostPageTables, 0));
    printf("88 is %d, 100 is %d\n", pageable, tables);
    return verdict(pageable >= 0 && tables >= 0);
}
