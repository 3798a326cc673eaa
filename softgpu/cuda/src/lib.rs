//! A CUDA driver in software behind the vendor's C ABI.
