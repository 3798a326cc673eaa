//! Tests of the whole system; a file each, all in one binary.

mod attacks;
mod canary;
mod chaos;
mod cloud_hypervisor;
mod conformance;
mod containers;
mod custody;
mod direct;
mod escape;
mod firecracker;
mod guest;
mod hostile;
mod management;
mod mig;
mod newcomer;
mod packages;
mod runtimes;
mod succession;
mod time;
mod units;
mod vm;
mod vmms;
mod vsock;
