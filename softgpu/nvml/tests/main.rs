//! The management library, through C and through other bindings.

#![allow(unsafe_code, reason = "calls a C library")]

mod mig;
mod nvml;
