//! Facts of the CUDA driver ABI shared by shim, worker and software GPU.
