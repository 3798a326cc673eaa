//! A CUDA driver that does nothing, quickly: the benchmarks' floor.
